"""What impl="auto" runs."""

import pytest
import torch
from operands import Geometry

from diffattn.ops import choice, diff_attention, softmax_attention
from diffattn.ops.fused import library

HAS_COMPILER = library.compiler() is not None
FASTEST = "fused" if HAS_COMPILER else "blocked"
LONG = Geometry(T=70, S=70)


def chosen(call, caplog):
    """Names of implementations that a call tells the log."""
    choice._log_choice.cache_clear()
    caplog.clear()
    with caplog.at_level("INFO", logger="diffattn"):
        call()
    return [r.getMessage().split("'")[3] for r in caplog.records if "runs" in r.getMessage()]


def test_each_choice_is_told_once(caplog):
    tensors = LONG.draw()

    def call():
        for _ in range(3):
            diff_attention(*tensors, lam=0.4)
            diff_attention(*tensors, lam=0.4, dropout=0.1)
            softmax_attention(*tensors[:3])

    assert chosen(call, caplog) == [FASTEST, "reference", FASTEST]


@pytest.mark.parametrize("reason", ["softcap", "dropout", "mask", "func", "subclass"])
def test_what_the_kernel_does_not_serve(reason, caplog):
    tensors = LONG.draw()
    options = {
        "softcap": {"softcap": 5.0},
        "dropout": {"dropout": 0.1, "dropout_masks": "independent"},
        "mask": {"mask": torch.zeros(70, 70, dtype=torch.float64, requires_grad=True)},
    }.get(reason, {})

    def run(q):
        return diff_attention(q, *tensors[1:], lam=0.4, **options)

    def call():
        if reason == "func":
            torch.func.vmap(run)(tensors[0][None])
        elif reason == "subclass":
            run(tensors[0].as_subclass(type("Own", (torch.Tensor,), {})))
        else:
            run(tensors[0])

    assert chosen(call, caplog) == ["reference" if reason == "softcap" else "sdpa"]


def test_without_a_compiler(monkeypatch, caplog):
    monkeypatch.setattr(choice, "_has_kernel", lambda: False)
    assert chosen(lambda: diff_attention(*LONG.draw(), lam=0.4), caplog) == ["blocked"]
    assert chosen(lambda: diff_attention(*Geometry().draw(), lam=0.4), caplog) == ["sdpa"]


@pytest.mark.skipif(not HAS_COMPILER, reason="impl='fused' needs a C++ compiler: g++, or CXX")
def test_a_damaged_kernel_is_no_kernel(tmp_path, monkeypatch):
    """What a full disk left in the cache costs speed, not the call."""
    path = tmp_path / "attention.so"
    path.write_bytes(b"not a library")
    monkeypatch.setattr(library, "_path", lambda: path)
    # without the answers of earlier calls
    monkeypatch.setattr(library, "library", library.library.__wrapped__)
    assert not library.is_available.__wrapped__()
    with pytest.raises(NotImplementedError, match="cannot load"):
        library.library()


def test_compiled_code_takes_the_same(caplog):
    tensors = [tensor.float() for tensor in LONG.draw()]
    run = torch.compile(lambda *t: diff_attention(*t, lam=0.4, causal=True), backend="aot_eager")
    torch.testing.assert_close(
        run(*tensors), diff_attention(*tensors, lam=0.4, causal=True), rtol=0, atol=1e-5
    )


def test_export_holds_operators_of_torch_alone():
    class Layer(torch.nn.Module):
        def forward(self, *tensors):
            return diff_attention(*tensors, lam=0.4)

    program = torch.export.export(Layer(), tuple(LONG.draw()))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any("scaled_dot_product" in name for name in names)
    assert not any("diffattn" in name for name in names)
