"""The part of an answer that is graded."""

import re
from enum import StrEnum

# In "-2" the minus is a sign; in "5 - 3" and "7-8" it is not.
_NUMBER = re.compile(r"(?<![\d.])-?\d+(?:\.\d+)?")


def last_number(text: str) -> str:
    """The last number of the answer: "6 + 2 = 8." is graded as "8"."""
    found = _NUMBER.findall(text)
    return found[-1] if found else ""


class Extraction(StrEnum):
    """The part of an answer that is graded."""

    LAST_NUMBER = "last-number"
    WHOLE = "whole"
    FIRST_LINE = "first-line"

    def of(self, answer: str) -> str:
        match self:
            case Extraction.LAST_NUMBER:
                return last_number(answer)
            case Extraction.FIRST_LINE:
                return answer.strip().partition("\n")[0].strip()
            case Extraction.WHOLE:
                return answer.strip()
