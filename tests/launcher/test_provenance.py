from launcher.environment import detect_environment
from launcher.provenance import describe_environment, describe_job


def test_job_is_named_with_its_restarts_and_left_out_outside_slurm() -> None:
    assert describe_job({}) == {}
    assert describe_job({"SLURM_JOB_ID": "71"}) == {"slurm_job_id": 71, "slurm_restart_count": 0}
    assert describe_job({"SLURM_JOB_ID": "71", "SLURM_RESTART_COUNT": "2"})["slurm_restart_count"] == 2


def test_environment_of_a_job_holds_its_number_among_the_rest(monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    described = describe_environment(detect_environment({}))
    assert described["slurm_job_id"] == 71 and described["world_size"] == 1
