"""The sizes of real models' gradients."""


def _resnet50() -> list[int]:
    """Returns the elements of ResNet-50's 161 parameters, in order."""
    sizes = [64 * 3 * 49, 64, 64]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            sizes += [channels * width, width, width, width * width * 9, width, width]
            sizes += [width * width * 4, width * 4, width * 4]
            if block == 0:
                sizes += [channels * width * 4, width * 4, width * 4]
            channels = width * 4
    return [*sizes, 2048 * 1000, 1000]


RESNET50 = _resnet50()
