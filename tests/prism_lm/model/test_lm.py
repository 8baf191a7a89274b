from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.prism_lm.model.builders import FAMILIES, SMALL, build_rows, build_small, relative_error

STARTS = ((0, 13), (1, 20), (1, 21))


def _grads(model, rows):
    model.zero_grad()
    model(*rows).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def _checkpoint_blocks(model):
    for block in model.blocks:
        block.forward = lambda *args, run=block.forward: checkpoint(run, *args, use_reentrant=False)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_packed_documents_lose_as_much_as_alone(family):
    model = build_small(FAMILIES[family])
    ids_BT, start_BT, labels_BT = build_rows(1, 41, starts=((0, 13), (0, 30)))
    packed_BT = model(ids_BT, start_BT, labels_BT, reduction="none")
    alone = []
    for span in (slice(0, 13), slice(13, 30), slice(30, 41)):
        starts = torch.arange(span.stop - span.start)[None] == 0
        alone.append(model(ids_BT[:, span], starts, labels_BT[:, span], reduction="none"))
    assert relative_error(packed_BT, torch.cat(alone, 1)) < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_loss_is_the_cross_entropy_of_the_logits_over_valid_labels(family):
    model = build_small(FAMILIES[family])
    ids_BT, start_BT, labels_BT = build_rows(2, 24, starts=STARTS)
    labels_BT[:, 5:9] = -100
    logits_BTV, _ = model.logits(ids_BT, document_start_BT=start_BT)
    expected_BT = functional.cross_entropy(logits_BTV.mT, labels_BT, reduction="none")
    each_BT = model(ids_BT, start_BT, labels_BT, reduction="none")
    assert torch.allclose(each_BT, expected_BT, atol=1e-12) and not each_BT[:, 5:9].any()
    assert torch.allclose(model(ids_BT, start_BT, labels_BT), expected_BT.sum(), rtol=1e-13)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_reaches_every_parameter(family):
    grads = _grads(build_small(FAMILIES[family]), build_rows(2, 24, starts=STARTS))
    assert not [name for name, grad in grads.items() if not grad.any()]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_later_tokens_do_not_change_earlier_logits(family):
    model = build_small(FAMILIES[family])
    ids_BT, start_BT, _ = build_rows(2, 24)
    changed_BT = ids_BT.clone()
    changed_BT[:, 15:] = (changed_BT[:, 15:] + 1) % 61
    before, _ = model.logits(ids_BT, document_start_BT=start_BT)
    after, _ = model.logits(changed_BT, document_start_BT=start_BT)
    assert torch.allclose(before[:, :15], after[:, :15], atol=1e-12)
    assert not torch.allclose(before[:, 15:], after[:, 15:], atol=1e-3)


def test_tied_head_sums_both_gradients_in_one_parameter():
    tied, untied = build_small(SMALL), build_small(replace(SMALL, tie_embeddings=False))
    untied.load_state_dict(tied.state_dict())
    rows = build_rows(2, 24)
    both, apart = _grads(tied, rows), _grads(untied, rows)
    assert "head.weight" not in both
    assert torch.allclose(both["embedding.weight"], apart["embedding.weight"] + apart["head.weight"], atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointed_blocks_give_the_same_gradients(family):
    model, rows = build_small(FAMILIES[family]), build_rows(2, 24, starts=STARTS)
    expected = _grads(model, rows)
    _checkpoint_blocks(model)
    grads = _grads(model, rows)
    assert all(torch.equal(grads[name], grad) for name, grad in expected.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_no_layers_state_outlives_it_in_a_checkpointed_forward(family):
    """Keys and values of attention above all: held until the backward they would cost what checkpointing saves."""
    model, states = build_small(FAMILIES[family]), []

    def watch(_mixer, _inputs, outputs):
        states.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in outputs[1] if tensor is not None)

    for block in model.blocks:
        block.mixer.register_forward_hook(watch)
    _checkpoint_blocks(model)
    loss = model(*build_rows(2, 24, starts=STARTS))
    assert loss.requires_grad and states and all(state.expired() for state in states)


def test_block_of_every_mixer_but_ttt_compiles_to_one_graph_and_gives_the_same_gradients():
    """Traced, differentiated and cut by the compiler's front end, without a break."""
    every = replace(SMALL, num_layers=4, layer_pattern=["prism", "gated_delta", "linear_attention", "attention"])
    model, rows = build_small(every), build_rows(2, 24, starts=STARTS)
    expected = _grads(model, rows)
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    grads = _grads(model, rows)
    assert all(relative_error(grads[name], grad) < 1e-9 for name, grad in expected.items())


@contextmanager
def _parameters_present_only_in_their_owners_forward(model):
    """As under ZeRO-3: a module's own parameters have values from the start of its forward to its end."""
    handles = []
    for module in model.modules():
        values = {name: parameter.data for name, parameter in module.named_parameters(recurse=False)}

        def bring(module, _inputs, values=values):
            for name, value in values.items():
                module._parameters[name].data = value

        def release(module, *_):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.new_empty(0)

        handles += [module.register_forward_pre_hook(bring), module.register_forward_hook(release)]
    for parameter in model.parameters():
        parameter.data = parameter.data.new_empty(0)
    yield
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_each_parameter_is_read_only_inside_its_owners_forward(family):
    model, rows = build_small(FAMILIES[family]), build_rows(2, 24, starts=STARTS)
    expected = model(*rows)
    with _parameters_present_only_in_their_owners_forward(model):
        assert torch.equal(model(*rows), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_model_has_the_losses_and_gradients_of_fp32_within_its_rounding(family):
    """Against fp32 with the same, rounded, weights. Each token's loss is right to two roundings, 2^-7 in the mean
    square. Some 40 roundings of 2^-8 lie between a weight and the loss and back, 0.16 if all were to agree: 1/4 for
    every parameter's gradient is above that, and below a term that is missing, doubled or of the wrong sign. The
    gradient of a decay rate is a signed sum over all tokens; of this seed none cancels to a small rest."""
    rounded, rows = build_small(FAMILIES[family], seed=4, dtype=torch.bfloat16), build_rows(2, 40, starts=STARTS)
    exact = build_small(FAMILIES[family], dtype=torch.float32)
    exact.load_state_dict(rounded.state_dict())
    with torch.no_grad():
        losses_BT, expected_BT = (model(*rows, reduction="none") for model in (rounded, exact))
    assert losses_BT.dtype == torch.float32 and relative_error(losses_BT, expected_BT) < 2**-7
    grads, expected = _grads(rounded, rows), _grads(exact, rows)
    assert not [name for name, grad in expected.items() if relative_error(grads[name].float(), grad) > 1 / 4]


def test_forward_hooks_see_decay_step_sizes_and_state():
    model, seen = build_small(SMALL), {}
    mixer = model.blocks[1].mixer
    for name in ("decay", "step_sizes"):
        getattr(mixer, name).register_forward_hook(lambda _m, _i, out, name=name: seen.update({name: out.shape}))
    mixer.register_forward_hook(lambda _m, _i, out: seen.update(state=out[1].state_BHVK.shape))
    model(*build_rows(2, 24))
    assert seen == {"decay": (2, 24, 2), "step_sizes": (2, 24, 2, 2), "state": (2, 2, 16, 16)}
