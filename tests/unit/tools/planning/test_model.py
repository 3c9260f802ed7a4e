"""Predictions that measured all-reduces correct."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from unisono.costs import Cluster, Link, Run, Tuning
from unisono_tools.cli import main
from unisono_tools.planning.model import Model
from unisono_tools.pricing import phases_of, running, seconds_of

LINK = Link(1e-5, 1e9)
TIMES = ((1 << 10, 1e-3), (1 << 12, 2e-3), (1 << 20, 9e-3))


def cluster(num_hosts: int, ranks_per_host: int) -> Cluster:
    return Cluster(num_hosts, ranks_per_host, LINK, LINK, 1e10)


def own_seconds(model: Model, num_bytes: float) -> float:
    return model.seconds(running(model.cluster, num_bytes)[1], num_bytes)


def test_what_was_measured_is_predicted_as_it_was() -> None:
    model = Model(cluster(2, 2), [Run(2, 2, TIMES)])

    assert [own_seconds(model, size) for size, _ in TIMES] == pytest.approx([s for _, s in TIMES])
    assert 1e-3 < own_seconds(model, 1 << 11) < 2e-3


def test_sizes_outside_have_the_correction_of_the_last_one() -> None:
    model = Model(cluster(2, 2), [Run(2, 2, TIMES)])

    for size, nearest in ((0, TIMES[0]), (1, TIMES[0]), (1 << 30, TIMES[-1])):
        uncorrected = Model(model.cluster)
        factor = nearest[1] / own_seconds(uncorrected, nearest[0])
        assert own_seconds(model, size) == pytest.approx(factor * own_seconds(uncorrected, size))


def test_another_cluster_is_corrected_by_the_one_most_alike() -> None:
    near, far = Run(4, 2, ((1024, 1.0),)), Run(2, 8, ((1024, 5.0),))
    model = Model(cluster(8, 2), [far, near])

    assert model.run is near
    there = cluster(4, 2)
    factor = 1.0 / seconds_of(running(there, 1024)[1], there, 1024)
    ring = phases_of("ring", 8, 2)
    assert model.seconds(ring, 1e6) == pytest.approx(factor * seconds_of(ring, model.cluster, 1e6))


def test_one_host_does_not_correct_several_or_the_other_way_round() -> None:
    assert Model(cluster(2, 2), [Run(1, 4, TIMES)]).run is None
    assert Model(cluster(1, 4), [Run(2, 2, TIMES)]).run is None


@pytest.mark.parametrize(
    ("shape", "options", "corrected_by"),
    [
        (("2", "2"), [], {"hosts": 2, "gpus": 2}),
        (("1", "4"), [], {"hosts": 1, "gpus": 2}),
        # A link that was not measured was not measured in the all-reduces, either.
        (("2", "2"), ["--bandwidth", "1e9"], None),
        (("1", "4"), ["--bandwidth", "1e9"], {"hosts": 1, "gpus": 2}),
        (("1", "4"), ["--inside-latency", "1e-6"], None),
        (("2", "2"), ["--memory-rate", "1e12"], None),
    ],
)
def test_plan_says_what_corrects_it(
    tmp_path: Path,
    shape: tuple[str, str],
    options: list[str],
    corrected_by: dict[str, int] | None,
) -> None:
    runs = (Run(1, 2, TIMES), Run(2, 2, TIMES))
    tuning = Tuning(LINK, LINK, LINK, LINK, LINK, 1e10, {}, "today", "0", runs=runs)
    (tmp_path / "tuning.json").write_text(tuning.to_text())
    arguments = ["plan", "--hosts", shape[0], "--gpus", shape[1], "--model-bytes", "1M", *options]
    arguments += ["--tuning", str(tmp_path / "tuning.json")]

    plan = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).output)
    shown = CliRunner().invoke(main, arguments).output

    assert plan["corrected_by"] == corrected_by
    assert ("corrected by all-reduces" in shown) == (corrected_by is not None)
