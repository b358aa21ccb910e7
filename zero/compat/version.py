"""The version that `import deepspeed` shows: DeepSpeed's whose surface is covered, and ours of the alias."""

from __future__ import annotations

VERSION = "0.19.6+zero.1"
"""The name of the dist-info folder and its METADATA say the same; a test holds them together."""
