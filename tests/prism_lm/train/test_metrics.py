"""Rates over an interval, and what mixers did."""

import pytest
import torch

from prism_lm.model.lm import LanguageModel
from prism_lm.train.metrics import Meter, find_peak_flops, observe_mixers, read_peak_gib
from tests.harness import TinyModel, build_batch, build_language_config


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_rates_leave_out_pauses_and_count_waits() -> None:
    clock = Clock()
    meter = Meter(total_steps=30, flops_per_token=10.0, peak_flops=10_000.0, clock=clock)
    meter.start(step=10, tokens=1000)
    with meter.waiting():
        clock.now_s += 1.0
    with meter.paused():
        clock.now_s += 50.0
    clock.now_s += 3.0
    figures = meter.read(step=20, tokens=2000)
    assert figures == pytest.approx(
        {
            "speed/tokens_per_s": 250.0,
            "speed/step_ms": 400.0,
            "speed/data_wait_pct": 25.0,
            "speed/eta_s": 4.0,
            "speed/mfu_pct": 25.0,
        }
    )
    clock.now_s += 1.0
    assert meter.read(step=21, tokens=2100)["speed/tokens_per_s"] == pytest.approx(100.0)


def test_unknown_hardware_has_no_mfu() -> None:
    assert find_peak_flops(torch.device("cpu"), "bf16") is None
    meter = Meter(total_steps=2, flops_per_token=10.0, peak_flops=None, clock=Clock())
    assert "speed/mfu_pct" not in meter.read(step=1, tokens=1)


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("Other", None)])
def test_peak_is_that_of_the_card_named(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert find_peak_flops(torch.device("cuda", 0), "bf16") == peak
    assert find_peak_flops(torch.device("cuda", 0), "fp32") is None


def test_this_process_holds_some_memory() -> None:
    assert 0.01 < read_peak_gib(torch.device("cpu")) < 1000


def test_mixers_are_observed_and_only_while_asked() -> None:
    config = build_language_config(num_layers=3, solver_steps=2, layer_pattern=["prism", "gated_delta", "attention"])
    model = LanguageModel(config)
    batch = build_batch(3, seed=0)
    with observe_mixers(model) as seen:
        model(**batch)
    per_token = batch["input_ids_BT"].numel() * 2
    assert seen["decay/blocks.0.mixer"].numel() == per_token
    assert seen["step_size/blocks.0.mixer"].numel() == 2 * per_token
    assert seen["state_norm/blocks.0.mixer"].shape == (3 * 2,)
    assert not [tag for tag in seen if "blocks.2" in tag]
    for tag, values in seen.items():
        assert values.dtype == torch.float32 and values.min() >= 0.0
        assert tag.startswith("state_norm") or values.max() <= 1.0
    seen.clear()
    model(**batch)
    assert not seen


def test_model_without_mixers_shows_nothing() -> None:
    model = TinyModel()
    with observe_mixers(model) as seen:
        model(**build_batch(2, seed=0))
    assert seen == {}
