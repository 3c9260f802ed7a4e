"""Every example runs, and what its first lines promise is true."""

from __future__ import annotations

import ast
import json
import re
import runpy
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from worker_threads import end_replica_threads

from unisono_tools.cli import main as unisono
from unisono_tools.processes import one_thread

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def one_thread_per_replica() -> Iterator[None]:
    with one_thread():
        yield


def run(name: str, *arguments: object, **constants: object) -> Any:
    """Runs an example as its command line would, and returns what its `main` does."""
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    assert constants.keys() <= main.__globals__.keys()
    main.__globals__.update(constants)
    return main([str(argument) for argument in arguments])


def demo(*arguments: object) -> Any:
    """Runs what `examples/digits.py` does."""
    return unisono([str(word) for word in ("demo", *arguments)], standalone_mode=False)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_the_first_lines_say_how_to_run_it(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""

    assert f"python examples/{path.name}" in docstring


def test_digits_are_learnt_to_97_percent(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")

    (training,) = demo("--replicas", 2, "--plot", tmp_path / "digits.png")

    assert training.accuracies[-1] >= 0.97


def test_digits_have_the_same_losses_with_1_2_and_4_replicas(tmp_path: Path, capfd: Any) -> None:
    pytest.importorskip("sklearn")
    picture = tmp_path / "digits.png"

    trainings = demo("--epochs", 3, "--plot", picture)

    assert [one.num_replicas for one in trainings] == [1, 2, 4]
    for one in trainings[1:]:
        assert one.losses == pytest.approx(trainings[0].losses, rel=1e-9)
    assert picture.stat().st_size > 1000
    assert "[c10d]" not in capfd.readouterr().err


@pytest.mark.timeout(400)
def test_digits_have_the_same_weights_when_workers_are_killed_and_join(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    picture = tmp_path / "elastic.png"

    found = demo("--elastic", "--epochs", 4, "--plot", picture)

    assert found.are_equal
    assert len(found.undisturbed) == 4 * 15
    assert {0, 1, 2} <= {worker for ran in found.layout.values() for worker in ran.values()}
    assert picture.stat().st_size > 1000


def test_the_replicas_of_the_elastic_demo_are_its_own(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")

    with pytest.raises(click.UsageError, match="--replicas"):
        demo("--elastic", "--replicas", 2)


def test_the_picture_of_the_digits_counts_whole_epochs(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    from unisono_tools.demo import Training, draw

    for num_epochs in (1, 2, 15):
        path = tmp_path / f"{num_epochs}.svg"
        numbers = [1.0 / (1 + epoch) for epoch in range(num_epochs)]
        draw([Training(1, numbers, numbers)], path)
        # The x axes of both panels. Matplotlib keeps each label in a comment.
        parts = re.findall(r'id="matplotlib.axis_[13]">(.*?)id="matplotlib', path.read_text(), re.S)
        labels = [re.findall(r"<!-- (\S+) -->", part) for part in parts]

        assert len(labels) == 2
        assert all(all(label.isdigit() or label == "epoch" for label in one) for one in labels)
        assert all("epoch" in one and len(one) > 1 for one in labels)


def test_the_recommender_comes_near_the_noise() -> None:
    assert run("recommender", "--replicas", 2) <= 0.15


def test_the_recommender_does_not_depend_on_the_number_of_replicas() -> None:
    errors = [run("recommender", "--replicas", count, "--epochs", 1) for count in (1, 3)]

    assert errors[0] == pytest.approx(errors[1], rel=1e-9)


@pytest.mark.timeout(300)
def test_characters_need_fewer_bits_than_their_frequencies() -> None:
    assert run("characters", "--epochs", 2) < 4.7


def test_characters_are_the_same_in_two_runs(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for _ in range(2):
        run("characters", "--replicas", 2, "--epochs", 1, NUM_LETTERS=20_000)
        outputs.append(capsys.readouterr().out)

    assert outputs[0] == outputs[1]


def test_a_preempted_training_resumes_to_the_same_bits(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    undisturbed = run("preemption", "--folder", tmp_path / "one", "--steps", 12)

    with pytest.raises(SystemExit) as left:
        run("preemption", "--folder", tmp_path / "two", "--steps", 12, "--stop-after", 7)
    resumed = run("preemption", "--folder", tmp_path / "two", "--steps", 12)

    # A program that leaves keeps its handler of SIGTERM to the end.
    signal.signal(signal.SIGTERM, before)
    assert left.value.code == 0
    assert resumed == undisturbed
    del left
    end_replica_threads()


@pytest.mark.timeout(400)
def test_survivors_of_killed_workers_have_the_weights_of_an_undisturbed_run(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    picture, trouble = tmp_path / "elastic.png", ("--", "--workers", 2, "--every", 4, "--events", 1)

    found = run("elastic", "--epochs", 1, "--plot", picture, *trouble)

    assert found.are_equal
    assert set(found.layout[0].values()) == {0, 1}
    assert len(set(found.layout[14].values())) == 1
    assert [one.name for one in tmp_path.iterdir()] == [picture.name]


def test_the_gan_finds_the_ring() -> None:
    quality = run("gan", "--epochs", 7)

    assert quality.near >= 0.8
    assert quality.num_modes >= 5


def test_rounded_gradients_train_as_well_for_half_the_bytes() -> None:
    whole, half = run("own_reduction")

    assert half.loss == pytest.approx(whole.loss, rel=0.1)
    assert half.num_bytes * 2 == whole.num_bytes


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_the_port_ends_with_the_loss_of_a_plain_loop(replicas: int) -> None:
    loss, plain = run("from_tensorflow", "--replicas", replicas)

    assert loss == pytest.approx(plain, abs=1e-12)


def test_the_tensorflow_program_in_the_comments_is_whole() -> None:
    lines = (EXAMPLES / "from_tensorflow.py").read_text().splitlines()
    comments = [line.strip().removeprefix("# tf|") for line in lines if "# tf|" in line]

    program = ast.parse("\n".join(comment.removeprefix(" ") for comment in comments))

    assert "MirroredStrategy" in ast.unparse(program)


def test_images_are_learnt_and_a_finished_training_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--replicas", 2, "--epochs", 3, "--checkpoint", tmp_path / "images.pt")

    accuracy = run("image_classification", *arguments)
    first = capsys.readouterr().out
    again = run("image_classification", *arguments)

    assert accuracy > 0.9
    assert first.count("epoch") == 3
    assert again == accuracy
    assert "epoch" not in capsys.readouterr().out


def test_a_hugging_face_model_learns_and_loads_without_a_strategy(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")

    accuracy = run("hugging_face", "--replicas", 2, "--save", tmp_path / "bert")

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "bert")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "bert")
    with torch.no_grad():
        scores = model(**tokenizer(["the story was lovely"], return_tensors="pt")).logits
    assert accuracy > 0.9
    assert scores.argmax().item() == 1


def test_the_notebook_runs_and_its_cells_can_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    cells = {cell["id"]: cell for cell in notebook["cells"]}
    namespace: dict[str, Any] = {"__name__": "__main__"}

    # What a kernel does with the cells of code.
    code = [name for name, cell in cells.items() if cell["cell_type"] == "code"]
    for name in [*code, "train", "evaluate"]:
        exec(compile("".join(cells[name]["source"]), name, "exec"), namespace)

    output = capsys.readouterr().out
    assert output.count("loss") == 6
    assert "caught: no labels in this batch" in output
    assert namespace["accuracy"] > 0.9
    assert (tmp_path / "model.pt").exists()
    namespace["strategy"].close()


def test_the_notebook_is_whole_and_has_no_outputs() -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())

    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        known = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            known |= {"outputs", "execution_count"}
        assert cell.keys() == known


def test_every_example_is_in_the_list() -> None:
    page = (EXAMPLES / "README.md").read_text()

    names = [path.name for path in EXAMPLES.iterdir() if path.suffix in ("", ".py", ".ipynb")]

    assert [name for name in names if name[0] not in "._" and f"({name})" not in page] == []
