"""Inputs of the decode benchmark: caches that rotate, scattered pages, and the FP64 answer."""

import pytest
import torch

from benchmarks import decode_inputs
from benchmarks.batch_shape import BatchShape
from benchmarks.decode_inputs import DecodeInputs, enough_calls, num_caches, num_calls, quantised, worst_relative_l2


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> DecodeInputs:
    monkeypatch.setattr(decode_inputs, "num_caches", lambda cache_bytes: 2)
    return DecodeInputs.random(BatchShape("ragged", (130, 1, 64)), 3, 64, torch.device("cpu"))


@pytest.mark.parametrize(("cache_bytes", "caches"), [(4096 * 1152, 85), (32768 * 1152, 11), (200_000_000, 2), (2_415_919_104, 2)])
def test_caches_rotate_over_enough_bytes(cache_bytes: int, caches: int) -> None:
    assert num_caches(cache_bytes) == caches
    assert caches * cache_bytes >= 400_000_000


def test_caches_beyond_the_memory_cap_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 KV caches of 20.1 GB exceed the 40 GB"):
        num_caches(20_100_000_000)


@pytest.mark.parametrize(
    ("caches", "keys", "calls"), [(85, 4096, 85), (11, 32768, 22), (3, 131072, 18), (2, 32 * 16384, 16), (2, 64 * 16384, 10), (2, 128 * 16384, 6)]
)
def test_every_cache_is_called_equally_often(caches: int, keys: int, calls: int) -> None:
    assert num_calls(caches, keys * 1152) == calls


def test_pages_are_scattered_and_each_belongs_to_one_request(inputs: DecodeInputs) -> None:
    used = [inputs.block_table[request, :n].tolist() for request, n in enumerate((3, 1, 1))]
    assert sorted(page for pages in used for page in pages) == [0, 1, 2, 3, 4]
    assert [page for pages in used for page in pages] != [0, 1, 2, 3, 4]
    assert inputs.block_table.dtype == inputs.seq_lens.dtype == torch.int32
    assert inputs.caches.shape == (2, 5, 64, 576)


def test_reference_is_softmax_attention_over_the_visible_keys(inputs: DecodeInputs) -> None:
    for layer in (0, 1):
        out = inputs.reference(layer)
        for request, length in enumerate((130, 1, 64)):
            keys = torch.stack([inputs.caches[layer, inputs.block_table[request, k // 64].item(), k % 64] for k in range(length)]).double()
            query = inputs.q[request].double()[None]
            wanted = torch.nn.functional.scaled_dot_product_attention(query, keys[None], keys[None, :, :512], scale=192**-0.5)[0]
            torch.testing.assert_close(out[request], wanted)
    assert not torch.equal(inputs.reference(0), inputs.reference(1))


def test_every_request_of_the_first_and_the_last_layer_has_a_reference(inputs: DecodeInputs) -> None:
    references = inputs.references()
    assert list(references) == [0, len(inputs.caches) - 1]
    assert all(torch.equal(values, inputs.reference(layer)) and len(values) == len(inputs.q) for layer, values in references.items())


@pytest.mark.parametrize(("caches", "us", "calls"), [(85, 60.0, 85), (2, 400.0, 14), (3, 750.0, 9), (2, 10_000.0, 2)])
def test_a_replay_of_five_milliseconds_is_enough(caches: int, us: float, calls: int) -> None:
    assert enough_calls(caches, us) == calls


def test_worst_request_is_reported_even_beside_large_ones() -> None:
    reference = torch.cat([torch.full((1, 2, 512), 100.0), torch.full((1, 2, 512), 0.01)]).double()
    out = reference.clone()
    out[1] *= 1.5
    assert worst_relative_l2(out.float(), reference) == pytest.approx(0.5, rel=1e-5)
    out[0, 0, 0] = float("nan")
    assert worst_relative_l2(out, reference) != worst_relative_l2(out, reference)


def test_each_query_token_sees_the_keys_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_inputs, "num_caches", lambda cache_bytes: 2)
    inputs = DecodeInputs.random(BatchShape.parse("2x70q3"), 2, 64, torch.device("cpu"))
    assert inputs.q.shape == (6, 2, 576) and inputs.empty_outputs().shape == (2, 6, 2, 512)
    out = inputs.reference(0)
    for row, visible in enumerate((68, 69, 70, 68, 69, 70)):
        alone = DecodeInputs(BatchShape("alone", (visible,)), inputs.q[row : row + 1], inputs.caches, inputs.block_table[row // 3 :], inputs.seq_lens)
        torch.testing.assert_close(out[row], alone.reference(0)[0])


def test_bf16_cache_has_no_scale(inputs: DecodeInputs) -> None:
    assert (inputs.k_scale, inputs.kv_dtype_name, inputs.kv_bytes) == (None, "bf16", 195 * 1152)


@pytest.mark.parametrize("k_scale", [0.06, 1.0, 2.5])
def test_e4m3_cache_times_its_scale_is_what_was_asked_for(k_scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_inputs, "num_caches", lambda cache_bytes: 2)
    inputs = DecodeInputs.random(BatchShape("ragged", (130, 1, 64)), 3, 64, torch.device("cpu"), torch.float8_e4m3fn, k_scale)
    assert inputs.k_scale is not None and inputs.k_scale.shape == (1,) and inputs.k_scale.dtype == torch.float32
    assert inputs.q.dtype == inputs.empty_outputs().dtype == torch.bfloat16
    assert (inputs.kv_dtype_name, inputs.kv_bytes) == ("fp8_e4m3", 195 * 576)
    exact = inputs.caches.double() * inputs.k_scale.double()
    assert exact.std().item() == pytest.approx(1.0, abs=0.02)
    whole = DecodeInputs(inputs.shape, inputs.q, exact, inputs.block_table, inputs.seq_lens)
    torch.testing.assert_close(inputs.reference(1), whole.reference(1))
    assert not torch.equal(inputs.caches[0].view(torch.uint8), inputs.caches[1].view(torch.uint8))


def test_rotated_caches_are_counted_in_their_own_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(decode_inputs, "num_caches", lambda cache_bytes: asked.append(cache_bytes) or 2)
    for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn):
        DecodeInputs.random(BatchShape("one", (64,)), 1, 64, torch.device("cpu"), kv_dtype)
    assert asked == [64 * 1152, 64 * 576]


def test_quantisation_rounds_to_e4m3_and_saturates() -> None:
    values, scale = torch.randn(4096), torch.tensor([0.25])
    back = quantised(values, scale).float() * scale
    assert ((back - values).abs() <= values.abs() / 16 + 0.25 * 2**-10).all()  # 3 bits of mantissa; half the smallest subnormal
    assert quantised(torch.tensor([1e6, -1e6, 448.0]), torch.ones(1)).tolist() == [448.0, -448.0, 448.0]
