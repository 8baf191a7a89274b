"""Layers of flash-linear-attention by model.mixer=peer, on a GPU (its kernels have no CPU form)."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data_pipeline.synthetic import write_synthetic_dataset
from launcher.curves import read_metrics
from prism_lm.model.baselines import GatedDeltaMixer
from prism_lm.model.cost import count_parameters
from prism_lm.model.lm import build_model
from prism_lm.model.operators import build_plain_operators
from prism_lm.model.sizes import named_size
from tests.prism_lm.model.builders import relative_error

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parent.parent.parent.parent
LAYERS = {
    "GatedDeltaNet": {},
    "GatedLinearAttention": {},
    "Mamba2": {},
    "DeltaNet": {},
    "GatedDeltaProduct": {"num_householder": 2},
}
STEPS, ROW_TOKENS = 30, 256
SPANS = {0: [(0, 70), (70, 71), (71, 200)], 1: [(0, 137), (137, 200)]}


@pytest.fixture(autouse=True)
def library():
    return pytest.importorskip("fla.layers")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "prepared"
    return write_synthetic_dataset(folder, vocab_size=320, row_tokens=ROW_TOKENS, documents=400, seed=0)


def _config(layer: str, **settings):
    return replace(named_size("tiny"), mixer="peer", peer_layer=layer, peer_options=LAYERS[layer], **settings)


def _build_mixer(layer: str, dtype: torch.dtype, **settings):
    """The first layer's mixer, in training mode, in which the package takes its chunk form at any length."""
    model = build_model(_config(layer, num_layers=1, **settings), seed=1, device="cuda", dtype=dtype)
    return model.train().blocks[0].mixer


def _rows(dtype: torch.dtype):
    generator = torch.Generator("cuda").manual_seed(2)
    x_BTD = torch.randn(2, 200, 192, device="cuda", generator=generator).to(dtype)
    start_BT = torch.zeros(2, 200, dtype=torch.bool, device="cuda")
    for row, spans in SPANS.items():
        for first, _ in spans:
            start_BT[row, first] = True
    return x_BTD, start_BT


@pytest.mark.timeout(500)
@pytest.mark.parametrize(("layer", "stage"), [*((layer, 1) for layer in LAYERS), ("GatedDeltaNet", 3)])
def test_tiny_with_that_layer_trains_on_packed_documents(layer, stage, data, tmp_path):
    options = "{" + ", ".join(f"{name}: {value}" for name, value in LAYERS[layer].items()) + "}"
    keys = [f"run_dir={tmp_path / 'run'}", f"data.path={data}", "model.vocab_size=320", f"train.steps={STEPS}"]
    peer = ["model.mixer=peer", f"model.peer_layer={layer}", f"model.peer_options={options}"]
    rest = ["train.precision=bf16", f"train.zero_stage={stage}", "train.eval_every_steps=0", "train.log_every_steps=1"]
    command = [sys.executable, "-m", "launcher", "train", "configs/train/tiny.yaml", *keys, *peer, *rest]
    done = subprocess.run(
        [*command, "train.schedule.warmup_steps=5"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [line["train/loss_nats"] for line in read_metrics(tmp_path / "run")]
    print(f"{layer}: {losses[0]:.3f} to {losses[-1]:.3f} nats")
    assert len(losses) == STEPS and losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("layer", LAYERS)
def test_documents_of_a_packed_row_are_mixed_as_they_are_alone(layer):
    """Output and the gradient of the input, in bf16, whose rounding of 2^-9 passes through some products one after
    another: within 2^-6 of their norm, and a quarter of what comes of rows read through."""
    mixer = _build_mixer(layer, torch.bfloat16)
    x_BTD, start_BT = _rows(torch.bfloat16)
    gradient_BTD = torch.randn(x_BTD.shape, generator=torch.Generator("cuda").manual_seed(3), device="cuda").bfloat16()

    def run(x_BTD, start_BT, gradient_BTD):
        x_BTD = x_BTD.detach().clone().requires_grad_()
        out_BTD = mixer(x_BTD, start_BT, None)[0]
        out_BTD.backward(gradient_BTD)
        return torch.stack([out_BTD.detach(), x_BTD.grad]).double()

    packed, through = (run(x_BTD, starts, gradient_BTD) for starts in (start_BT, None))
    alone = torch.empty_like(packed)
    for row, spans in SPANS.items():
        for first, last in spans:
            cut = (slice(row, row + 1), slice(first, last))
            alone[:, cut[0], cut[1]] = run(x_BTD[cut], None, gradient_BTD[cut])
    for what, one, expected, leaking in zip(("output", "gradient"), packed, alone, through, strict=True):
        error, leak = relative_error(one, expected), relative_error(leaking, expected)
        print(f"{layer} {what}: packed {error:.2e}, read through {leak:.2e}")
        assert error < 2**-6 and error < leak / 4


def test_gated_delta_net_by_the_peer_mixes_as_our_own_mixer_does():
    """fp32 against our fp64 form, with the peer's weights, within 2^-8, since the peer multiplies in TF32."""
    mixer = _build_mixer("GatedDeltaNet", torch.float32, value_width=128).eval()
    theirs = dict(mixer.peer.named_parameters())
    ours = GatedDeltaMixer(_config("GatedDeltaNet", value_width=128), operators=build_plain_operators())
    weights = {
        "query_key_value.weight": torch.cat([theirs[f"{part}_proj.weight"] for part in "qkv"]),
        "conv.weight": torch.cat([theirs[f"{part}_conv1d.weight"].squeeze(1) for part in "qkv"]),
        "step_and_decay.weight": torch.cat([theirs["b_proj.weight"], theirs["a_proj.weight"]]),
        "decay.A_log": theirs["A_log"],
        "decay.dt_bias": theirs["dt_bias"],
        "gate.weight": theirs["g_proj.weight"],
        "norm.weight": theirs["o_norm.weight"],
        "output.weight": theirs["o_proj.weight"],
    }
    ours = ours.to("cuda", torch.float64)
    ours.load_state_dict(weights)
    x_BTD, start_BT = _rows(torch.float32)
    with torch.no_grad():
        apart = relative_error(mixer(x_BTD, start_BT, None)[0].double(), ours(x_BTD.double(), start_BT, None)[0])
    print(f"apart {apart:.2e}")
    assert apart < 2**-8


@pytest.mark.parametrize("layer", LAYERS)
def test_counted_parameters_are_those_of_the_built_layer(layer):
    model = build_model(_config(layer), seed=0, device="cuda")
    assert count_parameters(model.config) == sum(parameter.numel() for parameter in model.parameters())
    again = build_model(_config(layer), seed=0, device="cuda").state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())
