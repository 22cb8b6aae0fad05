"""Which part of a model each process holds under tensor parallelism."""

from math import gcd
from typing import TYPE_CHECKING

from diffattn.errors import UserError
from diffattn.models.summed_gradients import SUMMED_GRADIENTS
from diffattn.nn.lambdas import VECTORS

if TYPE_CHECKING:
    from diffattn.models.configuration_diff import DiffTransformerConfig


def tensor_parallel_plan(config: "DiffTransformerConfig") -> dict[str, str]:
    """The parallel style of each module of the decoder, as transformers and vLLM read it.

    Args:
        config: says which modules there are.

    Returns:
        Styles by name in the decoder. Names come before those that they begin with, for vLLM
        takes the first that the module's name begins with.
    """
    layers = range(config.num_hidden_layers)
    kinds = [config.attention_kind(index) for index in layers]
    choices = [config.diff_choices(i) for i in layers if kinds[i] != "softmax"]
    attention = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
    if any(choice.output_gate for choice in choices):
        attention["g_proj"] = "colwise"
    if any(choice.lam == "sigmoid" for choice in choices):
        attention["lam.lambda_proj"] = "colwise"
    exponential = [choice for choice in choices if choice.lam == "exponential"]
    if any(choice.lam_per != "layer" for choice in exponential):  # the same in all of them
        attention |= {f"lam.{name}": "colwise" for name in VECTORS}
    if exponential:
        attention["lam"] = SUMMED_GRADIENTS
    if any(choice.head_norm for choice in choices):
        attention["subln"] = SUMMED_GRADIENTS
    if config.qk_norm:
        attention |= {"q_norm": SUMMED_GRADIENTS, "k_norm": SUMMED_GRADIENTS}
    plan = {f"layers.*.self_attn.{name}": style for name, style in attention.items()}
    if config.attention_sink:
        plan |= {
            "layers.*.self_attn.sinks": "colwise",
            "layers.*.self_attn": SUMMED_GRADIENTS,
        }
    # PolyNorm takes its mean squares over the whole inner width
    whole = config.hidden_act == "poly_norm"
    into = "colwise_gather_output" if whole else "colwise"
    return plan | {
        "embed_tokens": "embedding_rowwise",
        "layers.*.mlp.gate_proj": into,
        "layers.*.mlp.up_proj": into,
        "layers.*.mlp.down_proj": "rowwise_split_input" if whole else "rowwise",
    }


def check_tensor_parallel(config: "DiffTransformerConfig", degree: int) -> None:
    """Refuse a degree that would part what belongs together.

    A key/value head stays on one process with the stripes of query heads that read it, so the
    degree divides the key/value heads of every layer.

    Args:
        config: of the model.
        degree: processes among which each layer's heads are divided.

    Raises:
        UserError: the degree does not divide the key/value heads of a layer, or one lam for all
            heads of a layer comes from each token.
    """
    if degree == 1:
        return
    geometries = [config.kernel_geometry(index) for index in range(config.num_hidden_layers)]
    for index, (heads, groups, _) in enumerate(geometries):
        kind = config.attention_kind(index)
        if groups % degree:
            raise UserError(
                f"tp_size: {degree} does not divide the {groups} key/value heads of layer {index} "
                f"({kind}); each stays on one process with the {heads // groups} query heads that "
                f"read it; expected a divisor of {gcd(*(groups for _, groups, _ in geometries))}"
            )
        if kind != "softmax" and config.diff_choices(index)[:2] == ("sigmoid", "layer"):
            raise UserError(
                f"tp_size: {degree} processes divide the heads of layer {index}, whose sigmoid "
                "lam_per='layer' is one value for all of them; expected lam_per 'head' or 'group'"
            )
