"""A switch that makes operators wrong, slow or absent where a benchmark calls them."""

import pytest

from diffattn.bench import sides


@pytest.fixture
def planted(monkeypatch):
    """planted(impl, change): what `change` makes of an implementation's differential output."""

    def plant(impl, change):
        real = sides.diff_attention

        def changed(*tensors, impl, **options):
            out = real(*tensors, impl=impl, **options)
            return change(out) if impl == named else out

        named = impl
        monkeypatch.setattr(sides, "diff_attention", changed)

    return plant
