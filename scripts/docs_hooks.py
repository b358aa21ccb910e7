"""mkdocs calls this: links of a page that leave docs/ become links into the repository, or its paths."""

from __future__ import annotations

import os
import re
from typing import Any

REPOSITORY = os.environ.get("ZERO_REPOSITORY_URL", "")
"""Such as https://host/owner/zero-infinity/blob/main; empty: the paths are shown, without a link."""
OUTSIDE = re.compile(r"\[(?P<text>(?:[^\[\]]|\[[^\]]*\])+)\]\(\.\./(?P<path>[^)]+)\)")


def on_page_markdown(markdown: str, **more: Any) -> str:
    """The page as the site shows it."""

    def moved(found: re.Match[str]) -> str:
        text, path = found["text"], found["path"]
        if REPOSITORY:
            return f"[{text}]({REPOSITORY}/{path})"
        return text if path in text else f"{text} (`{path}`)"

    return OUTSIDE.sub(moved, markdown)
