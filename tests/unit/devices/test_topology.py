import json

import pytest
from recorded_machines import FOLDER, NAMES, recorded

from unisono.devices import Link, LinkKind, Topology
from unisono.errors import DeviceError


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("X", Link(LinkKind.SAME)),
        ("NV2", Link(LinkKind.NVLINK, 2)),
        ("NVS18", Link(LinkKind.NVSWITCH, 18)),
        ("NV1*", Link(LinkKind.NVLINK, 1, is_peer=False)),
        ("PIX", Link(LinkKind.PIX)),
        ("SYS*", Link(LinkKind.SYS, is_peer=False)),
        ("?*", Link(LinkKind.UNKNOWN, is_peer=False)),
    ],
)
def test_a_link_is_read_as_it_is_printed(text: str, link: Link) -> None:
    assert Link.parse(text) == link
    assert str(link) == text


@pytest.mark.parametrize("wrong", ["", "*", "NV", "NVS", "PIX2", "QPI", "SYS**", "nv2", "NV2 "])
def test_what_is_no_link_is_refused_and_shown(wrong: str) -> None:
    with pytest.raises(DeviceError, match=r"A link is one of X, NVS, NV, .* got") as caught:
        Link.parse(wrong)

    assert repr(wrong) in str(caught.value)


def test_links_are_ordered_from_near_to_far() -> None:
    texts = ["SYS", "NV1", "X", "?*", "PIX*", "NODE", "PIX", "NVS18", "?", "PHB", "PXB"]

    ordered = sorted(texts, key=lambda text: Link.parse(text).distance)

    assert " ".join(ordered) == "X NVS18 NV1 PIX PIX* PXB PHB NODE SYS ? ?*"


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_stays_itself_when_read_and_written(name: str) -> None:
    recording = json.loads((FOLDER / f"{name}.json").read_text())

    assert Topology.from_json(recording).to_json() == recording


@pytest.mark.parametrize("name", NAMES)
def test_recorded_links_are_the_same_from_both_ends(name: str) -> None:
    topology = recorded(name)
    indices = range(len(topology.gpus))

    assert all(topology.link(a, b) == topology.link(b, a) for a in indices for b in indices)
    assert all(topology.gpus[a].links[a] == Link(LinkKind.SAME) for a in indices)


def test_the_six_nvlinks_of_each_gpu_of_a_dgx_1_are_recorded() -> None:
    counts = [sum(link.num_nvlinks for link in gpu.links) for gpu in recorded("dgx_1").gpus]

    assert counts == [6] * 8


def test_a_gpu_that_is_not_there_is_joined_in_no_known_way() -> None:
    assert str(recorded("one_gpu").link(0, 1)) == "?*"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "KeyError: 'gpus'"),
        ({"gpus": []}, "KeyError: 'source'"),
        ({"gpus": [1], "source": ""}, "TypeError"),
        ({"gpus": [{"name": "a", "links": ["X"]}], "source": ""}, "num_bytes"),
        ({"gpus": [{"name": "a", "num_bytes": 1, "links": []}], "source": ""}, "GPU 0 has 0"),
        ({"gpus": [{"name": "a", "num_bytes": 1, "links": ["Y"]}], "source": ""}, "got 'Y'"),
    ],
)
def test_what_is_no_recording_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        Topology.from_json(wrong)
