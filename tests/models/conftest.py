"""Small models of every kind."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # makes `import tiny` work
