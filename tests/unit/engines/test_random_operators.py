"""Every operator of torch that draws random numbers is known, also those of versions to come.

torch says of each of its operators whether it draws. An operator that is new makes this test fail:
add it to `unisono/engines/random_operators.py`, or here with the reason why it need not be there.
"""

import torch

from unisono.engines.random_operators import DRAWING, overloads

# Why an operator that draws, as torch says, need not be known.
EXCEPTIONS: dict[str, str] = {
    "_cudnn_attention_backward": "is given what the forward pass has drawn",
    "_cudnn_attention_forward_no_dropout_inplace": "draws nothing, as its name says",
    "_cudnn_init_dropout_state": "is given a seed, which `random_` draws",
    "_cudnn_rnn": "is given a state, which `_cudnn_init_dropout_state` makes",
    "_fill_mem_eff_dropout_mask_": "is given a seed",
    "_flash_attention_forward_no_dropout_inplace": "draws nothing, as its name says",
    "_fused_sdp_choice": "chooses a kernel and draws nothing",
    "_lstm_mps": "of Apple's GPUs alone",
    "_nested_tensor_softmax_with_shape": "draws nothing",
    "_scaled_dot_product_attention_math_for_mps": "of Apple's GPUs alone",
    "_scaled_dot_product_cudnn_attention_backward": "is given what the forward pass has drawn",
    "_scaled_dot_product_efficient_attention_backward": "is given what the forward pass has drawn",
    "_scaled_dot_product_flash_attention_for_cpu": "does not take dropout",
    "_triton_scaled_dot_attention": "does not take dropout",
    "miopen_rnn": "of ROCm alone: is given a state",
}
# Operators that draw, though their tag does not say so in every version.
ALSO_RANDOM = {"binomial", "_sample_dirichlet", "random_"}


def random_operators() -> set[str]:
    """The names of all operators that draw and that torch does not take apart at once."""
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace != "aten":
            continue
        packet, _, overload = rest.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        draws = torch.Tag.nondeterministic_seeded in operator.tags or packet in ALSO_RANDOM
        if draws and operator in overloads(packet):
            found.add(packet)
    return found


def test_every_operator_that_draws_is_known() -> None:
    found = random_operators()
    unknown = sorted(found - {*DRAWING, *EXCEPTIONS})

    assert unknown == [], (
        f"torch {torch.__version__} draws random numbers in {unknown}, which replicas do not know. "
        "They would all draw from one generator at the same time. Add them to "
        "`unisono/engines/random_operators.py`."
    )
    assert {"uniform_", "bernoulli_", "multinomial", "native_dropout", "rand"} <= found
