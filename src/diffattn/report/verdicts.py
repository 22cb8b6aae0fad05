"""What a comparison can say."""

from typing import Final

BETTER: Final = "better"
WORSE: Final = "worse"
NO_DIFFERENCE: Final = "no difference"
DECIDED: Final = (BETTER, WORSE)
VERDICTS: Final = (BETTER, NO_DIFFERENCE, WORSE)
