"""The commands that the page of systems shows."""

import re
import shlex

from tests.helpers.repository import ROOT

PAGE = (ROOT / "docs" / "systems.md").read_text()
BLOCKS = re.findall(r"```\n(fedcover run .*?)```", PAGE, re.DOTALL)
WORDS = [shlex.split(block.replace("\\\n", " ")) for block in BLOCKS]
COMMANDS = {words[words.index("--set") + 1].removeprefix("name="): words for words in WORDS}
