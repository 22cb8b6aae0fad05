"""Makes `import families` work."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="DEX needs the extra hf")

sys.path.append(str(Path(__file__).parent))
