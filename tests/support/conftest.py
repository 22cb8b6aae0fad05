"""Makes `import layers` and the like work."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
