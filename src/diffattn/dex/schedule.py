"""lam of DEX over the steps of training."""


def schedule_shares(step: int, *, start: float, ramp_steps: int) -> tuple[float, float]:
    """The fixed part of lam and the share of what is learned.

        lam(t) = (1 - a) (t / T) lambda_init + a lambda_learn,  a = min(1, t / T)

    Args:
        step: t, optimizer steps done.
        start: lambda_init of the layer.
        ramp_steps: T; 0 means that lam is lambda_learn from the first step.

    Returns:
        (1 - a) (t / T) lambda_init, and a.

    Source: Kong et al., arXiv 2505.16333, Eq. 4.
    """
    progress = min(1.0, step / ramp_steps) if ramp_steps else 1.0
    return (1.0 - progress) * progress * start, progress
