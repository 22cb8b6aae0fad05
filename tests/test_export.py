"""Compiled and exported programs are the eager ones, for any batch and length."""

import pytest
import torch

from diffattn import DiffAttention

BATCH = torch.export.Dim("batch", min=1, max=64)
LENGTH = torch.export.Dim("length", min=2, max=512)
DYNAMIC = {0: BATCH, 1: LENGTH}

LAYERS = {
    "v1": lambda impl: DiffAttention.v1(
        32, match_heads=8, match_key_value_heads=4, layer_idx=1, impl=impl, rope_theta=1e4
    ),
    "v2": lambda impl: DiffAttention.v2(32, match_heads=4, impl=impl, window=5),
    "grouped": lambda impl: DiffAttention.grouped(
        32, ratio=2, match_heads=8, layer_idx=1, impl=impl, lam_per="head"
    ),
    "grouped_latent": lambda impl: DiffAttention.grouped_latent(
        32, ratio=2, match_heads=4, impl=impl, qk_norm=True, lam_per="group"
    ),
}


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_an_exported_layer_serves_every_batch_and_length(name, impl):
    layer = LAYERS[name](impl).eval()
    program = torch.export.export(layer, (torch.randn(3, 7, 32),), dynamic_shapes=(DYNAMIC,))
    exported = program.module()
    for batch, length in ((1, 2), (4, 300), (2, 9)):  # more than one block of rows among them
        x = torch.randn(batch, length, 32)
        torch.testing.assert_close(exported(x), layer(x), rtol=0, atol=1e-6)


class Logits(torch.nn.Module):
    """A language model as a function of one tensor."""

    def __init__(self, kind):
        super().__init__()
        import tiny

        self.model = tiny.model(kind)

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


KINDS = ["softmax-gqa", "v1-gqa", "v2-gqa", "grouped", "mixed"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_model_serves_every_batch_and_length(kind):
    pytest.importorskip("transformers", reason="models need the extra hf")
    import tiny

    model = Logits(kind)
    program = torch.export.export(model, (tiny.tokens(3, 7),), dynamic_shapes=(DYNAMIC,))
    exported = program.module()
    for batch, length in ((1, 4), (4, 20)):
        ids = tiny.tokens(batch, length)
        torch.testing.assert_close(exported(ids), model(ids), rtol=0, atol=1e-6)


class MaskedLogits(Logits):
    """The same of token ids and their padding mask."""

    def forward(self, ids, mask):
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits


@pytest.mark.parametrize("kind", ["v1-gqa", "v2-gqa"])
def test_an_exported_model_takes_padding(kind):
    pytest.importorskip("transformers", reason="models need the extra hf")
    import tiny

    model, example = MaskedLogits(kind), (tiny.tokens(3, 7), torch.ones(3, 7, dtype=torch.long))
    exported = torch.export.export(model, example, dynamic_shapes=(DYNAMIC, DYNAMIC)).module()
    for ids, mask in both_sides_padded():
        torch.testing.assert_close(exported(ids, mask), model(ids, mask), rtol=0, atol=1e-6)


def both_sides_padded():
    """Token ids and masks of two sizes, the first row padded left, a later one right."""
    import tiny

    for batch, length in ((1, 4), (4, 20)):
        ids = tiny.tokens(batch, length)
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
        mask[1:2, -3:] = 0
        yield ids, mask


@pytest.mark.parametrize("kind", ["v1-gqa", "v2-gqa", "grouped"])
def test_onnxruntime_gives_the_logits_of_the_model(kind, tmp_path):
    """Of every token; what stands on padding that sees nothing is finite, no more."""
    pytest.importorskip("transformers", reason="models need the extra hf")
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="ONNX needs the extra export")
    import onnxruntime
    import tiny

    model, path = MaskedLogits(kind), tmp_path / "model.onnx"
    torch.onnx.export(
        model,
        (tiny.tokens(3, 7), torch.ones(3, 7, dtype=torch.long)),
        str(path),
        dynamo=True,
        dynamic_shapes=(DYNAMIC, DYNAMIC),
        input_names=["ids", "mask"],
        verbose=False,
    )
    session = onnxruntime.InferenceSession(path)
    for ids, mask in both_sides_padded():
        (got,) = session.run(None, {"ids": ids.numpy(), "mask": mask.numpy()})
        got, real = torch.from_numpy(got), mask.bool()
        torch.testing.assert_close(got[real], model(ids, mask)[real], rtol=0, atol=1e-5)
        assert got.isfinite().all()


class Graphs:
    """A compiler backend that counts the graphs it is given."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


@pytest.fixture
def strict():
    """A limit that is hit is an error, not a silent run without compilation."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=4):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("preset", ["v1", "v2", "grouped"])
@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "mask"])
@pytest.mark.parametrize("depth", [2, 12])
def test_layers_compiled_one_by_one_share_their_graphs(preset, depth, masked, strict):
    """Acceptance case 14: at most two graphs for two batch sizes, whatever the depth."""
    builders = {
        "v1": lambda i: DiffAttention.v1(32, match_heads=4, layer_idx=i),
        "v2": lambda i: DiffAttention.v2(32, match_heads=4, layer_idx=0),
        "grouped": lambda i: DiffAttention.grouped(32, ratio=2, match_heads=8, layer_idx=i),
    }
    graphs = Graphs()
    layers = [builders[preset](index) for index in range(depth)]
    compiled = [torch.compile(layer, fullgraph=True, backend=graphs) for layer in layers]
    for batch in (2, 3):
        x = torch.randn(batch, 6, 32)
        mask = torch.rand(batch, 1, 6, 6) > 0.3 if masked else None
        for layer, quick in zip(layers, compiled, strict=True):
            got, want = quick(x, mask=mask), layer(x, mask=mask)
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert graphs.count <= 2


@pytest.mark.parametrize("kind", ["v1-gqa", "v2-gqa"])
@pytest.mark.parametrize("padded", [False, True], ids=["no-padding", "padding"])
def test_a_model_compiles_whole_into_one_graph_whatever_its_depth(kind, padded, strict):
    pytest.importorskip("transformers", reason="models need the extra hf")
    import tiny

    for depth in (2, 12):
        torch._dynamo.reset()
        model, graphs = tiny.model(kind, num_hidden_layers=depth), Graphs()
        compiled = torch.compile(model, fullgraph=True, backend=graphs)
        with torch.no_grad():
            for batch in (2, 3):
                ids = tiny.tokens(batch, 8)
                mask = torch.ones_like(ids)
                mask[0, :3] = 0
                options = {"attention_mask": mask} if padded else {}
                got = compiled(ids, use_cache=False, **options).logits
                want = model(ids, use_cache=False, **options).logits
                torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
        assert graphs.count <= 2


@pytest.mark.slow  # the compiler builds C++ for minutes where its cache is cold
@pytest.mark.parametrize("preset", ["v1", "v2"])
@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "mask"])
def test_compiled_code_gives_the_numbers_and_gradients_of_eager_code(preset, masked, strict):
    """Acceptance case 14 with a compiler behind it; forward and backward within 1e-4."""
    layer = LAYERS[preset]("sdpa")
    compiled = torch.compile(layer, fullgraph=True)
    mask = torch.rand(2, 1, 6, 6) > 0.3 if masked else None
    results = []
    for run in (layer, compiled):
        torch.manual_seed(0)
        x = torch.randn(2, 6, 32, requires_grad=True)
        out = run(x, mask=mask)
        gradients = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
        results.append([out, *gradients])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_limit_of_recompilations_is_an_error():
    torch._dynamo.reset()
    layer = LAYERS["v1"]("sdpa")
    with torch._dynamo.config.patch(
        fail_on_recompile_limit_hit=True, recompile_limit=2, automatic_dynamic_shapes=False
    ):
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            [compiled(torch.randn(1, length, 32)) for length in range(2, 8)]
    torch._dynamo.reset()
