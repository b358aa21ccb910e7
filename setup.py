"""Packaging: everything static is in pyproject.toml; here the native libraries join the wheel."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from native import build as native_build  # noqa: E402  (build isolation does not put the project on sys.path)


def warn(text: str) -> None:
    """One warning that names the cost; the wheel is still built."""
    print(f"warning: zero-infinity: {text}", file=sys.stderr)


def build_libraries(package: Path) -> None:
    """Compile what can be compiled; a machine without a compiler gets the Python fallbacks."""
    for library in native_build.LIBRARIES:
        try:
            print(native_build.build(library, package))
        except (native_build.BuildError, OSError) as error:
            warn(str(error))
    if not native_build.is_current(native_build.LIBZN, package):
        warn(
            "no C library was built, so the slower torch and aiofiles fallbacks will run; "
            f"install gcc, then reinstall or run `{native_build.REBUILD_COMMAND}`"
        )


class BuildPyWithLibraries(build_py):
    """Copies the packages, then compiles inside the copy (in place for an editable install)."""

    def run(self) -> None:
        super().run()
        build_libraries(ROOT / "native" if self.editable_mode else Path(self.build_lib) / "native")


class PlatformWheel(bdist_wheel):
    """Tags the wheel py3-none-<platform>: the libraries depend on the machine, not on the Python ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    """Makes setuptools treat the wheel as platform-specific although it has no extension modules."""

    def has_ext_modules(self) -> bool:
        return True


os.chdir(ROOT)
setup(distclass=BinaryDistribution, cmdclass={"build_py": BuildPyWithLibraries, "bdist_wheel": PlatformWheel})
