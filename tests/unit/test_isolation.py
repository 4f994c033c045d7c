"""The self-test of step 0: it passes what is isolated and refuses every kind of leak."""

import pytest
import torch

from pixelrag.config.distill_parts import TeacherConfig
from pixelrag.errors import ModelError
from pixelrag.models.causal import CausalLM, head_logits
from pixelrag.models.causal_load import load_frozen
from pixelrag.models.isolation import LENGTHS, check_head, check_isolation, sample_rows
from pixelrag.models.precision import keep_float64
from pixelrag.models.rows import Rows
from pixelrag.models.tiny_causal import save_tiny_causal

CPU = torch.device("cpu")
BACKENDS = ("varlen", "sdpa", "eager")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("isolation")
    return {kind: save_tiny_causal(root / kind, kind, num_layers=3) for kind in ("qwen3", "gpt2")}


def frozen(folder, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_frozen(TeacherConfig(name_or_path=str(folder), attention=attention), dtype=dtype)


def as_the_run_does(model: CausalLM):
    @torch.no_grad()
    def forward(rows: Rows) -> torch.Tensor:
        hidden = model.hidden(rows)
        return model.with_head(hidden.flatten(0, 1), head_logits).unflatten(0, hidden.shape[:2])

    return forward


def called_with(model: CausalLM, **options):
    """transformers' own call, with what makes it leak."""

    @torch.no_grad()
    def forward(rows: Rows) -> torch.Tensor:
        inputs = {"position_ids": rows.position_ids_BT, "use_cache": False}
        inputs |= {
            name: value(rows) if callable(value) else value for name, value in options.items()
        }
        with keep_float64(model.dtype):
            return model.base_model(input_ids=rows.input_ids_BT, **inputs).logits

    return forward


def check(forward, precision: torch.dtype = torch.float32, name: str = "teacher") -> float:
    return check_isolation(
        forward, name=name, vocab_size=500, precision=precision, device=CPU,
        setting=f"{name}.attention",
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_what_is_isolated_passes(folders, kind, backend, dtype):
    forward = as_the_run_does(frozen(folders[kind], backend, dtype))
    limits = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.05}
    assert check(forward, dtype) <= limits[dtype]


LEAKS = {
    "a mask of ones": {"attention_mask": lambda rows: torch.ones_like(rows.input_ids_BT)},
    "a cache": {"use_cache": True},
    "no positions": {"position_ids": None},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("leak", LEAKS)
def test_every_leaky_call_is_refused(folders, leak, backend, dtype):
    model = frozen(folders["qwen3"], backend, dtype)
    with pytest.raises(ModelError, match=r"see each other.*up to [0-9.]+ .*teacher\.attention"):
        check(called_with(model, **LEAKS[leak]), dtype)
    check(called_with(model), dtype)  # the same call without the leak


def test_bounds_that_are_off_by_one_are_refused(folders):
    model = frozen(folders["qwen3"], "varlen")
    forward = as_the_run_does(model)

    def shifted(rows: Rows) -> torch.Tensor:
        inner = rows.cu_seqlens.clone()
        inner[1:-1] += 1
        return forward(Rows(rows.input_ids_BT, rows.position_ids_BT, rows.bounds, inner, 99))

    with pytest.raises(ModelError, match="self-test of the student"):
        check(shifted, name="student")


def test_positions_that_run_on_are_refused_where_they_matter(folders):
    """Isolated by bounds, but numbered through the row: learned positions differ, rotary do not."""

    def numbered_through(model: CausalLM):
        forward = as_the_run_does(model)

        def run(rows: Rows) -> torch.Tensor:
            positions = torch.arange(rows.input_ids_BT.shape[1]).expand(rows.input_ids_BT.shape)
            if len(rows.bounds) - 1 == len(rows.input_ids_BT):
                return forward(rows)
            return forward(
                Rows(rows.input_ids_BT, positions, rows.bounds, rows.cu_seqlens, rows.max_length)
            )

        return run

    check(numbered_through(frozen(folders["qwen3"], "varlen")))
    with pytest.raises(ModelError, match="other logits packed than alone"):
        check(numbered_through(frozen(folders["gpt2"], "varlen")))


def test_logits_that_are_not_finite_are_refused(folders):
    forward = as_the_run_does(frozen(folders["qwen3"]))
    with pytest.raises(ModelError, match="nan"):
        check(lambda rows: forward(rows) * float("nan"))


def test_a_small_leak_shows_in_bf16(folders):
    """A hundredth of the first document's mean state in all others."""
    forward = as_the_run_does(frozen(folders["qwen3"], dtype=torch.bfloat16))

    def leaky(rows: Rows) -> torch.Tensor:
        logits = forward(rows)
        first = rows.bounds[1]
        return logits + 0.1 * logits[:, :first].mean(1, keepdim=True) if len(logits) > 1 else logits

    with pytest.raises(ModelError, match="see each other"):
        check(leaky, torch.bfloat16)


def test_rows_of_the_self_test():
    rows = sample_rows(300)
    assert rows.input_ids_BT.shape == (2, sum(LENGTHS[0]))
    assert len({sum(lengths) for lengths in LENGTHS}) == 1
    assert int(rows.input_ids_BT.max()) < 300
    # No bound of one row is one of the other: a mask shared by mistake would show.
    inner = [set(torch.tensor(lengths).cumsum(0)[:-1].tolist()) for lengths in LENGTHS]
    assert not inner[0] & inner[1]


def test_a_head_that_does_more_than_is_known_is_refused(folders, tmp_path):
    model = frozen(save_tiny_causal(tmp_path / "g", "gemma2"), "eager")
    rows = sample_rows(500)
    whole = model.logits(rows)
    check_head(as_the_run_does(model)(rows), whole, name="teacher", precision=torch.float32)
    model._soft_cap = None
    with pytest.raises(ModelError, match=r"teacher.*loss\.implementation to logits"):
        check_head(as_the_run_does(model)(rows), whole, name="teacher", precision=torch.float32)
