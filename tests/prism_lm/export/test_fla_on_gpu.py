"""flash-linear-attention's Gated DeltaNet, saved by itself, against its weights in our model, on a GPU (it has no CPU
form)."""

import pytest
import torch

from prism_lm.export.fla import read_fla
from prism_lm.model.kernels import build_triton_operators
from prism_lm.model.lm import build_model
from prism_lm.model.operators import build_plain_operators

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("change", [{}, {"num_v_heads": 4}, {"tie_word_embeddings": True}], ids=str)
def test_imported_weights_give_the_peers_own_logits(tmp_path, change):
    """fp32 logits within 2^-8 of their norm, since the peer multiplies in TF32 (2^-11 a product, some layers deep), and
    at most twice as far from our fp64 form as the peer is."""
    models = pytest.importorskip("fla.models")
    settings = {"hidden_size": 256, "num_heads": 2, "head_dim": 64, "expand_v": 2, "num_hidden_layers": 3}
    torch.manual_seed(0)
    peer = models.GatedDeltaNetForCausalLM(models.GatedDeltaNetConfig(vocab_size=512, **settings, **change))
    peer.save_pretrained(tmp_path)
    peer = peer.cuda().eval()
    config, weights = read_fla(tmp_path)
    input_ids = torch.randint(512, (2, 300), device="cuda", generator=torch.Generator("cuda").manual_seed(1))

    def run(operators, dtype: torch.dtype) -> torch.Tensor:
        model = build_model(config, seed=0, device="cuda", dtype=dtype, operators=operators)
        model.load_state_dict(weights)
        return model.logits(input_ids)[0].double()

    with torch.no_grad():
        theirs = peer(input_ids).logits.double()
        exact, ours = run(build_plain_operators(), torch.float64), run(build_triton_operators(), torch.float32)
    scale = exact.norm()
    peer_error, our_error, apart = ((a - b).norm() / scale for a, b in ((theirs, exact), (ours, exact), (ours, theirs)))
    print(f"{change}: peer {peer_error:.2e}, ours {our_error:.2e}, apart {apart:.2e}")
    assert apart < 2**-8
    assert our_error < 2 * peer_error + 1e-5
