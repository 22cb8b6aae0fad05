"""Entry point by which vLLM finds the models: no remote code, no import of ours in a script."""

from diffattn.errors import UserError, needs_extra
from diffattn.models.modeling_diff import DiffTransformerForCausalLM

BACKEND = "TransformersForCausalLM"


def register() -> None:
    """Map our architecture to vLLM's Transformers backend; called by vLLM in every process.

    The Auto classes know the models as soon as this module is imported. May be called again.

    Raises:
        MissingExtraError: vLLM is not installed.
        UserError: vLLM has no Transformers backend.
    """
    with needs_extra("serving by vLLM", "vllm"):
        import vllm  # pyright: ignore[reportMissingImports] in an environment of its own
    registry = vllm.ModelRegistry
    if BACKEND not in registry.get_supported_archs():
        raise UserError(
            f"vllm: expected a version with the Transformers backend ({BACKEND}), such as "
            f"0.32.0, got {vllm.__version__}"
        )
    registry.register_model(
        DiffTransformerForCausalLM.__name__, f"vllm.model_executor.models.transformers:{BACKEND}"
    )
