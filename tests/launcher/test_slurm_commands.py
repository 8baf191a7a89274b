"""What SLURM's commands refuse, or do not answer, is said in one line; sbatch sees nothing that changes the job."""

from pathlib import Path

import pytest

from launcher import slurm_commands
from launcher.slurm_commands import SlurmAbsent, SlurmError, submit_script
from launcher.slurm_jobs import list_jobs
from launcher.slurm_partitions import list_partitions
from tests.launcher.fake_slurm import FakeSlurm, put_on_path


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    made = FakeSlurm(tmp_path / "fake slurm")
    put_on_path(made, monkeypatch)
    return made


def test_absent_programs_and_absent_settings_are_told_as_no_cluster(fake: FakeSlurm) -> None:
    with pytest.raises(SlurmAbsent, match=r"squeue is not on PATH; .*login node"):
        list_jobs()
    fake.write_program("sinfo", 'echo "sinfo: fatal: Could not establish a configuration source" >&2\nexit 1\n')
    with pytest.raises(SlurmAbsent, match=r"sinfo finds no slurm\.conf"):
        list_partitions()


def test_controller_that_does_not_answer_is_given_up(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_commands, "ASK_S", 0.3)
    fake.write_program("squeue", "exec sleep 30\n")
    with pytest.raises(SlurmError, match=r"squeue must answer within 0 s; .*scontrol ping"):
        list_jobs()


def test_words_of_a_refusal_are_passed_on(fake: FakeSlurm) -> None:
    fake.write_program("squeue", 'echo "slurm_load_jobs error: Unable to contact slurm controller" >&2\nexit 1\n')
    with pytest.raises(SlurmError, match=r"squeue must end with 0, not 1; it said: .*Unable to contact"):
        list_jobs()


def test_sbatch_gives_the_number_without_the_cluster_and_not_what_overrules_the_script(
    fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.install()
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1")
    script = fake.folder / "job.sh"
    assert submit_script(script, dependency="afterany:7", ignored=["SBATCH_TIMELIMIT"]) == "101"
    assert fake.read_calls("sbatch") == [f"--parsable --dependency=afterany:7 {script}"]
    assert (fake.folder / "sbatch.env").read_text() == "SBATCH_TIMELIMIT=unset\n"


def test_sbatch_that_answers_no_number_is_an_error(fake: FakeSlurm) -> None:
    fake.write_program("sbatch", "echo welcome\n")
    with pytest.raises(SlurmError, match="must answer with a job's number, not 'welcome'"):
        submit_script(Path("job.sh"))


def test_variables_of_a_job_that_submits_another_do_not_reach_it(
    fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.write_program("sbatch", 'env > "$here/seen"\necho 7\n')
    monkeypatch.setenv("SLURM_CONF", "kept")
    for name in ("SLURM_RESTART_COUNT", "SLURM_ARRAY_TASK_ID", "SLURM_NTASKS"):
        monkeypatch.setenv(name, "2")
    submit_script(Path("job.sh"))
    seen = [line for line in (fake.folder / "seen").read_text().splitlines() if line.startswith("SLURM_")]
    assert seen == ["SLURM_CONF=kept"]
