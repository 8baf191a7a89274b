import pytest

from launcher.continuation import Continuer, Settings, Speed
from launcher.trained_run import TrainedRun, load_trained_run
from tests.launcher.trained_folders import write_trained_run

SETTINGS = {"max_new_tokens": 30, "temperature": 0.8, "top_k": 0, "top_p": 0.95}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    return load_trained_run(write_trained_run(tmp_path_factory.mktemp("runs") / "small"))


def test_continuation_counts_its_tokens_and_says_why_it_ended(run: TrainedRun) -> None:
    (free,) = Continuer(run, Settings(**SETTINGS)).continue_batch(["the"], [1])
    assert (free.num_new_tokens, free.finish_reason) == (30, "length")
    (cut,) = Continuer(run, Settings(**SETTINGS, stops=(free.text[4:6],))).continue_batch(["the"], [1])
    assert cut.num_new_tokens < 30 and cut.finish_reason == "stop" and free.text.startswith(cut.text)


def test_shown_parts_of_each_prompt_add_up_to_its_text(run: TrainedRun) -> None:
    shown = ["", ""]

    def show(row: int, text: str) -> None:
        assert text
        shown[row] += text

    continuer = Continuer(run, Settings(**SETTINGS))
    texts = [one.text for one in continuer.continue_batch(["the", "a dog"], [1, 2], on_text=show)]
    assert shown == texts == [one.text for one in continuer.continue_batch(["the", "a dog"], [1, 2])]


def test_speed_is_that_since_it_was_last_taken(run: TrainedRun) -> None:
    continuer = Continuer(run, Settings(**{**SETTINGS, "max_new_tokens": 5, "temperature": 0.0}))
    for prompts in (["the", "a dog"], ["the"]):
        continuer.continue_batch(prompts, [0] * len(prompts))
        speed = continuer.take_speed()
        num_tokens = sum(len(continuer.encode(prompt)) for prompt in prompts)
        assert (speed.prompt_tokens, speed.new_tokens) == (num_tokens, 5 * len(prompts))
        assert speed.prompt_s > 0 < speed.new_s and speed.capture_s == 0
    assert continuer.take_speed() == Speed()


def test_making_a_graph_is_said_apart() -> None:
    speed = Speed(prompt_tokens=6000, prompt_s=2.0, new_tokens=500, new_s=0.25)
    words = "prompts: 6,000 tokens in 2.00 s, 3,000 tokens/s; new: 500 tokens in 0.25 s, 2,000 tokens/s"
    assert speed.describe() == words
    speed.capture_s = 0.5
    assert speed.describe() == words + "; CUDA graph made in 0.50 s"
