import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher import eval_suite
from launcher.eval_suite import (
    Suite,
    build_task_manager,
    explain_task_failure,
    read_suite,
    refuse_leaking_examples,
)

ROOT = Path(__file__).parent.parent.parent
TASKS = ROOT / "tests" / "eval_tasks"
NAMES = sorted(file.stem for file in TASKS.glob("*.yaml"))

SCORE_WITHOUT_NETWORK = """
import json, socket, sys
from pathlib import Path
asked = []
socket.socket.connect = lambda self, address: asked.append(address)
socket.getaddrinfo = lambda *address, **options: asked.append(address) or []
from launcher.eval_suite import build_task_manager
names = sys.argv[2:]
manager = build_task_manager(names, [Path(sys.argv[1])])
from lm_eval import evaluator, simple_evaluate
from lm_eval.models.dummy import DummyLM
evaluator.add_env_info = lambda storage: None  # it asks pip and others
results = simple_evaluate(model=DummyLM(), tasks=names, task_manager=manager, bootstrap_iters=0)
print(json.dumps({"asked": asked, "results": results["results"]}, default=float))
"""


@pytest.fixture(autouse=True)
def network_settings_come_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What go_offline sets ends with the test."""
    for variable in eval_suite.OFFLINE_VARIABLES:
        monkeypatch.setenv(variable, "0")
    for name in ("datasets.config", "huggingface_hub.constants"):
        if name in sys.modules:
            monkeypatch.setattr(sys.modules[name], "HF_HUB_OFFLINE", False)


def write_task(folder: Path, name: str, *, splits: tuple[str, ...] = ("test",), more: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = "".join(f"    {split}: ${{task_folder}}/{split}.jsonl\n" for split in splits)
    held = "".join(f"{'training' if split == 'train' else split}_split: {split}\n" for split in splits)
    (folder / f"{name}.yaml").write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n{files}{held}output_type: multiple_choice\n"
        f'doc_to_text: "{{{{question}}}}"\ndoc_to_choice: ["no", "yes"]\ndoc_to_target: answer\n{more}'
    )
    for split in splits:
        documents = [{"question": f"{split} {index}?", "answer": index % 2} for index in range(4)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))


def load_documents(folder: Path, name: str) -> list[dict[str, Any]]:
    return list(build_task_manager([name], [folder]).load([name])["tasks"][name].eval_docs)


@pytest.mark.parametrize("name", ["authors", "long_context"])
def test_shipped_suites_are_read_and_carry_their_files_name(name: str) -> None:
    suite = read_suite(ROOT / "configs" / "eval" / f"{name}.yaml")
    assert suite.name == name
    assert suite.num_fewshot == 0
    assert len(set(suite.tasks)) == len(suite.tasks) >= 5


def test_a_suite_keeps_its_own_name_before_the_files(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("name: mine\ntasks: [piqa]\nmax_length_tokens: 512\n")
    assert read_suite(tmp_path / "file.yaml") == Suite(name="mine", tasks=["piqa"], max_length_tokens=512)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks: []", r"tasks=\[\] must name at least one task"),
        ("tasks: [piqa]\nnum_fewshot: -1", "num_fewshot=-1 must be at least 0"),
        ("tasks: [piqa]\nmax_length_tokens: 1", "max_length_tokens=1 must be at least 2"),
        (
            "tasks: [piqa]\nnum_fewshots: 1",
            "num_fewshots must be a key of this configuration; did you mean num_fewshot",
        ),
    ],
)
def test_a_suite_that_breaks_a_rule_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "suite.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_suite(tmp_path / "suite.yaml")


def test_reading_a_suite_loads_no_evaluation_library() -> None:
    program = (
        "import sys; from launcher.eval_suite import read_suite; read_suite('configs/eval/authors.yaml'); "
        "print(sorted({'lm_eval', 'datasets', 'transformers', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_local_task_is_loaded_and_scored_without_asking_a_network(tmp_path: Path) -> None:
    assert len(NAMES) == 12
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    for variable in eval_suite.OFFLINE_VARIABLES:
        environment.pop(variable, None)
    command = [sys.executable, "-c", SCORE_WITHOUT_NETWORK, str(TASKS), *NAMES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["asked"] == []
    for name in NAMES:
        documents = (TASKS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        assert report["results"][name]["sample_len"] == len(documents)
        assert any("," in key and isinstance(value, float) for key, value in report["results"][name].items())


def test_a_copied_folder_reads_the_data_beside_it(tmp_path: Path) -> None:
    write_task(tmp_path / "here" / "first", "first")
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert load_documents(tmp_path / "there", "first")[1] == {"question": "test 1?", "answer": 1}


def test_a_folder_that_cannot_be_written_is_used_and_left_as_it_was(tmp_path: Path) -> None:
    write_task(tmp_path, "first")
    tmp_path.chmod(0o555)
    before = sorted(tmp_path.rglob("*"))
    assert len(load_documents(tmp_path, "first")) == 4
    assert sorted(tmp_path.rglob("*")) == before
    tmp_path.chmod(0o755)


def test_functions_beside_a_task_are_found(tmp_path: Path) -> None:
    write_task(tmp_path, "first", more="process_docs: !function rows.take_two\n")
    (tmp_path / "rows.py").write_text("def take_two(rows):\n    return rows.select([0, 1])\n")
    assert [document["question"] for document in load_documents(tmp_path, "first")] == ["test 0?", "test 1?"]


def test_a_task_that_includes_what_lm_eval_lacks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text("include: ${stock_tasks}/no_such/task.yaml\ntask: first\n")
    with pytest.raises(ValueError, match=r"must include a task that lm-eval ships; .*no_such/task.yaml is none"):
        build_task_manager(["first"], [tmp_path])


def test_a_missing_folder_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--task-data=.*absent must be an existing folder"):
        build_task_manager(["first"], [tmp_path / "absent"])


def test_a_definition_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    write_task(tmp_path, "first")
    (tmp_path / "other.yaml").write_bytes(b"# \xff")
    with pytest.raises(ValueError, match=r"other.yaml must be a text file that can be read"):
        build_task_manager(["first"], [tmp_path])


def test_a_definition_with_a_slip_is_named_and_not_looked_for_among_the_stock_tasks(tmp_path: Path) -> None:
    write_task(tmp_path, "first", more="metric_list: [\n")
    with pytest.raises(ValueError, match=r"task first must have a YAML that lm-eval can read"):
        build_task_manager(["first"], [tmp_path])


def test_a_missing_suite_is_refused_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--suite=.*absent.yaml must be an existing YAML file"):
        read_suite(tmp_path / "absent.yaml")


def test_stock_names_are_found_beside_local_ones_and_unknown_ones_refused_with_the_nearest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_task(tmp_path, "sciq")
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match=r"did you mean choice_of_two") as refusal:
        build_task_manager(["piqa", "sciq", "choice_of_four", "choice_of_tvo"], [TASKS, tmp_path])
    assert str(refusal.value).startswith("task choice_of_tvo must be one that lm-eval ships")
    assert not caplog.records, "that a local task goes before the shipped one is what it is there for"
    assert os.environ["HF_HUB_OFFLINE"] == "0", "a stock task may need the network"


def test_a_stock_task_without_data_says_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    stock = eval_suite._find_stock_tasks()
    manager = build_task_manager(["wikitext"], [stock / "wikitext"])
    with pytest.raises(Exception) as failure:
        manager.load(["wikitext"])
    message = explain_task_failure("wikitext", failure.value)
    assert message and "wiki.test.raw" in message and "HF_DATASETS_OFFLINE=1" in message


def test_the_remedy_fits_the_task_and_other_errors_are_left_alone() -> None:
    missing = ConnectionError("Couldn't reach the Hub")
    fetched = explain_task_failure("piqa", missing)
    assert fetched and "prism evaluate --fetch-data FOLDER" in fetched
    other = explain_task_failure("mmlu", missing)
    assert other and "--tasks mmlu" in other and "fetch-data" not in other
    assert explain_task_failure("piqa", ValueError("max_length_tokens=1")) is None
    wrapped = RuntimeError("task failed")
    wrapped.__cause__ = missing
    assert explain_task_failure("piqa", wrapped) == fetched


@pytest.mark.parametrize("splits", [("test",), ("validation",)])
def test_examples_from_the_scored_split_are_refused(tmp_path: Path, splits: tuple[str, ...]) -> None:
    write_task(tmp_path, "first", splits=splits)
    tasks = build_task_manager(["first"], [tmp_path]).load(["first"])["tasks"]
    refuse_leaking_examples(tasks, 0)
    refuse_leaking_examples(tasks, None)
    with pytest.raises(ValueError, match="num_fewshot=2 must be 0 for task first"):
        refuse_leaking_examples(tasks, 2)


@pytest.mark.parametrize(
    ("splits", "more"),
    [
        (("train", "test"), ""),
        (("validation", "test"), ""),
        (("train", "validation"), ""),
        (("test",), "fewshot_config:\n  samples:\n    - {question: a, answer: 1}\n"),
    ],
)
def test_examples_from_another_split_are_taken(tmp_path: Path, splits: tuple[str, ...], more: str) -> None:
    write_task(tmp_path, "first", splits=splits, more=more)
    refuse_leaking_examples(build_task_manager(["first"], [tmp_path]).load(["first"])["tasks"], 1)
