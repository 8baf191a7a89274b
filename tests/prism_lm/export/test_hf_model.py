"""The Hugging Face face of the model: padding, caches, losses, and which kernels it runs on."""

import pytest
import torch

from prism_lm.export import hf_model
from prism_lm.export.folder import SpecialTokens, describe_config, read_prism, split_shards, write_model
from prism_lm.export.hf_model import PrismCache, PrismConfig, PrismForCausalLM, find_padding_ends
from prism_lm.model.kernels import build_triton_operators
from tests.prism_lm.model.builders import FAMILIES, SMALL, build_rows, build_small

IDS = SpecialTokens(bos=1, eos=2, pad=0)


def build_both(config=SMALL, dtype=torch.float32):
    """Ours, and the same weights behind the other face."""
    ours = build_small(config, dtype=dtype).eval()
    settings = describe_config(config, tokens=IDS, row_tokens=64, dtype="float32")
    theirs = PrismForCausalLM(PrismConfig(**settings)).to(dtype).eval()
    theirs.model.load_state_dict(ours.state_dict())
    return ours, theirs


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_on_either_side_changes_no_logits_of_the_text(family) -> None:
    ours, theirs = build_both(FAMILIES[family], torch.float64)
    ids, _, _ = build_rows(1, 30)
    expected = ours.logits(ids)[0]
    noise, gap = torch.full((1, 7), 9), torch.zeros(1, 7, dtype=torch.int64)
    for row, mask, place in (
        (torch.cat([noise, ids], 1), torch.cat([gap, torch.ones_like(ids)], 1), slice(7, None)),
        (torch.cat([ids, noise], 1), torch.cat([torch.ones_like(ids), gap], 1), slice(0, 30)),
    ):
        found = theirs(row, attention_mask=mask).logits[:, place]
        assert (found - expected).abs().max() < 1e-12


def test_a_mask_without_padding_marks_no_document() -> None:
    assert find_padding_ends(torch.ones(2, 5), 5, 0) is None
    assert find_padding_ends(torch.tensor([[1, 1, 1, 0, 0]]), 5, 0) is None
    assert find_padding_ends(torch.tensor([[0, 0, 1, 1, 1]]), 1, 4) is not None


@pytest.mark.parametrize("mask", [[[1, 0, 1]], [[0, 1, 0, 1]], [[1, 1, 0, 0, 1]]])
def test_text_that_padding_interrupts_is_refused(mask) -> None:
    with pytest.raises(ValueError, match="attention_mask must show the text of each row in one piece"):
        find_padding_ends(torch.tensor(mask), 1, len(mask[0]) - 1)


@pytest.mark.parametrize("shape", [(1, 4), (1, 1, 5, 5)])
def test_a_mask_of_another_shape_is_refused(shape) -> None:
    with pytest.raises(ValueError, match="attention_mask must have 2 dims and 5 columns"):
        find_padding_ends(torch.ones(shape), 5, 0)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_goes_on_where_it_was_in_pieces_of_any_length(family) -> None:
    ours, theirs = build_both(FAMILIES[family], torch.float64)
    ids, _, _ = build_rows(2, 30)
    expected, cache = ours.logits(ids)[0], PrismCache()
    mask = torch.ones_like(ids)
    parts = []
    for begin, end in ((0, 13), (13, 14), (14, 30)):
        parts.append(theirs(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache).logits)
    assert cache.get_seq_length() == 30
    assert (torch.cat(parts, 1) - expected).abs().max() < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_cache_are_put_in_another_order_and_repeated(family) -> None:
    _, theirs = build_both(FAMILIES[family], torch.float64)
    ids, _, _ = build_rows(2, 9)
    output = theirs(ids, use_cache=True)
    cache, next_ids = output[hf_model.CACHE_NAME], torch.tensor([[5], [5], [5], [5]])
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 0, 2]))
    again = theirs(ids[[1, 0, 0, 1]], use_cache=True)[hf_model.CACHE_NAME]
    found, expected = (theirs(next_ids, past_key_values=one).logits for one in (cache, again))
    assert (found - expected).abs().max() < 1e-12


@torch.no_grad()
def test_packed_documents_do_not_see_one_another() -> None:
    ours, theirs = build_both(FAMILIES["hybrid"], torch.float64)
    ids, starts, _ = build_rows(2, 30, starts=((0, 11), (1, 20)))
    assert torch.equal(theirs(ids, document_start=starts).logits, ours.logits(ids, document_start_BT=starts)[0])


@torch.no_grad()
def test_loss_leaves_out_ignored_labels_and_divides_by_the_items_given() -> None:
    _, theirs = build_both()
    ids, _, _ = build_rows(2, 20)
    labels = ids.clone()
    labels[0, :12] = -100
    logits = theirs(ids).logits[:, :-1].flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    assert theirs(ids, labels=labels).loss.item() == pytest.approx(total.item() / (8 + 19), rel=1e-5)
    assert theirs(ids, labels=labels, num_items_in_batch=54).loss.item() == pytest.approx(total.item() / 54, rel=1e-5)


@torch.no_grad()
def test_logits_are_kept_only_where_they_are_asked_for() -> None:
    _, theirs = build_both(dtype=torch.float64)
    ids, _, _ = build_rows(2, 20)
    whole = theirs(ids).logits
    for asked, place in ((1, [19]), (3, [17, 18, 19]), (torch.tensor([3, 7]), [3, 7])):
        kept = theirs(ids, logits_to_keep=asked).logits
        assert kept.shape[1] == len(place) and (kept - whole[:, place]).abs().max() < 1e-12


def test_training_keeps_no_cache_unless_asked_and_embeddings_as_inputs_are_refused() -> None:
    _, theirs = build_both()
    ids, _, _ = build_rows(1, 8)
    assert theirs.train()(ids).get(hf_model.CACHE_NAME) is None
    assert theirs(ids, use_cache=True).get(hf_model.CACHE_NAME) is not None
    with pytest.raises(ValueError, match="takes no inputs_embeds"):
        theirs(inputs_embeds=torch.zeros(1, 8, 32))


def test_the_vocabulary_keeps_its_size() -> None:
    _, theirs = build_both()
    assert theirs.resize_token_embeddings(61) is theirs.model.embedding
    with pytest.raises(ValueError, match="must keep its 61 rows"):
        theirs.resize_token_embeddings(64)


def test_a_fresh_model_has_the_values_that_ours_has_at_seed_0() -> None:
    from prism_lm.model.lm import build_model

    settings = describe_config(SMALL, tokens=IDS, row_tokens=64, dtype="float32")
    fresh = PrismForCausalLM(PrismConfig(**settings))
    for name, parameter in build_model(SMALL, seed=0).named_parameters():
        assert torch.equal(fresh.model.get_parameter(name), parameter), name


def test_weights_that_a_file_lacks_are_drawn_and_those_it_has_are_kept(tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    ours = build_small(SMALL, dtype=torch.float32)
    write_model(tmp_path, ours, SMALL, tokens=IDS, row_tokens=64, max_shard_bytes=10**9)
    weights = load_file(tmp_path / "model.safetensors")
    missing = "model.blocks.1.mixer.decay.A_log"
    lacking = {name: weight for name, weight in weights.items() if name != missing}
    save_file(lacking, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = PrismForCausalLM.from_pretrained(tmp_path)
    fresh = PrismForCausalLM(loaded.config)
    assert torch.equal(loaded.get_parameter(missing), fresh.get_parameter(missing))
    for name, weight in lacking.items():
        assert torch.equal(loaded.get_parameter(name), weight), name


@torch.no_grad()
def test_kernels_of_our_package_run_where_a_tensor_is_for_them(monkeypatch) -> None:
    """In Triton's interpreter: the dispatch and the signatures. Numbers are the kernels' own tests'."""
    ours, theirs = build_both(FAMILIES["hybrid"])
    ids, _, _ = build_rows(1, 20)
    called = []
    monkeypatch.setattr(hf_model, "_is_for_kernels", lambda first: bool(called.append(first.shape)) or True)
    assert hf_model._load_fast() == build_triton_operators()
    first = theirs(ids[:, :-1], use_cache=True)
    last = theirs(ids[:, -1:], past_key_values=first[hf_model.CACHE_NAME]).logits
    assert len(called) > 10
    assert (last - ours.logits(ids)[0][:, -1:]).abs().max() < 1e-4


def test_plain_torch_runs_in_types_that_the_kernels_do_not_take() -> None:
    plain = torch.zeros(2, dtype=torch.float64)
    assert hf_model._find_form("scan", len, plain) is len


@pytest.mark.parametrize(
    ("limit", "expected"), [(100, [["a", "b", "c"]]), (10, [["a", "b"], ["c"]]), (8, [["a"], ["b"], ["c"]])]
)
def test_shards_take_weights_in_order_until_they_are_full(limit, expected) -> None:
    assert split_shards({"a": 5, "b": 5, "c": 8}, limit) == expected


def test_a_weight_larger_than_a_shard_is_named() -> None:
    with pytest.raises(ValueError, match="--max-shard-size must be at least 8 bytes, which c has"):
        split_shards({"a": 5, "c": 8}, 7)


@pytest.mark.parametrize("limit", [10**9, 20_000], ids=["one file", "shards"])
def test_a_folder_gives_back_the_weights_and_the_configuration_it_was_made_of(tmp_path, limit) -> None:
    config = FAMILIES["hybrid"]
    ours = build_small(config, dtype=torch.bfloat16)
    write_model(tmp_path, ours, config, tokens=IDS, row_tokens=64, max_shard_bytes=limit)
    read, weights = read_prism(tmp_path)
    assert read == config
    assert weights.keys() == dict(ours.named_parameters()).keys()
    assert all(torch.equal(weights[name], parameter) for name, parameter in ours.named_parameters())
