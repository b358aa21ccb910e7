"""The kernels compiled for aarch64, run by an emulator, as if they were one more instruction set of this machine.

With `pytest -p emulated_arm` the row `avx2` is what the compiler makes of the scalar
code for ARM (NEON), held against this machine's scalar kernels bit for bit. Needs `pip install ziglang unicorn`.
Guest addresses are those of this process: the emulator maps pages of the host as the kernels touch them, so arrays and
structs need no translation.
"""

from __future__ import annotations

import dataclasses
import errno
import mmap
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import native
from native import build

HERE = Path(__file__).resolve().parent
CHUNK, STACK = 1 << 16, 1 << 20
JUMP_SLOT, RELATIVE, ABSOLUTE, GLOBAL_DATA = 1026, 1027, 257, 1025  # Relocations of aarch64 (ELF's ABI).
CALLED: set[str] = set()
"""Functions that the emulator has run."""


def compiled(folder: Path) -> Path:
    """A shared object for aarch64 that needs no other."""
    sources = build.expand(("cpu/*.c",), build.PACKAGE)
    flags = [flag for flag in build.LIBZN.flags if not flag.startswith("-Wl,")]
    out = folder / "libcpu.so"
    command = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-gnu.2.28", *flags]
    command += ["-mno-outline-atomics", "-Wno-unknown-pragmas", "-Iinclude", "-o", str(out)]
    command += [str(path) for path in sources] + [str(HERE / "emulated_arm.c")]
    done = subprocess.run(command, cwd=build.PACKAGE, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return out


class Guest:
    """The library in memory of this process, and a processor to run it."""

    def __init__(self, path: Path) -> None:
        import unicorn
        from unicorn import arm64_const

        self.names, self.file = arm64_const, path.read_bytes()
        self.emulator = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self.emulator.ctl_set_tlb_mode(unicorn.UC_TLB_VIRTUAL)  # addresses are wider than those of its physical memory
        self.emulator.hook_add(unicorn.UC_HOOK_MEM_UNMAPPED, self.touched)
        self.emulator.reg_write(arm64_const.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # floating point and NEON
        self.memory = mmap.mmap(-1, (1 << 20) + STACK)
        self.base = address_of(self.memory)
        self.end = self.base + (1 << 20)  # A call returns there; the stack lies behind it.
        self.symbols = self._load()

    def touched(self, emulator: Any, kind: int, address: int, size: int, *rest: Any) -> bool:
        from unicorn import UC_PROT_ALL, UcError

        for page in {at // CHUNK * CHUNK for at in (address, address + size - 1)}:
            try:
                emulator.mem_map_ptr(page, CHUNK, UC_PROT_ALL, page)
            except UcError:
                continue  # the other half is there
        return address >= CHUNK

    def _load(self) -> dict[str, int]:
        header = struct.unpack_from("<16xHHIQQQIHHHHHH", self.file)
        programs, count = header[4], header[9]
        dynamic: dict[int, int] = {}
        for at in range(programs, programs + 56 * count, 56):
            kind, _, offset, address, _, nbytes, _, _ = struct.unpack_from("<IIQQQQQQ", self.file, at)
            if kind == 1:
                self.memory[address : address + nbytes] = self.file[offset : offset + nbytes]
            elif kind == 2:
                dynamic = dict(struct.unpack_from("<QQ", self.file, offset + i) for i in range(0, nbytes, 16))
        listed = self._symbols(dynamic)
        for table, size in ((7, 8), (23, 2)):
            for at in range(dynamic.get(table, 0), dynamic.get(table, 0) + dynamic.get(size, 0), 24):
                where, info, addend = struct.unpack_from("<QQq", self.memory, at)
                kind, symbol = info & 0xFFFFFFFF, info >> 32
                if kind not in (JUMP_SLOT, RELATIVE, ABSOLUTE, GLOBAL_DATA):
                    raise ValueError(f"relocation {kind}")
                value = addend + (0 if kind == RELATIVE else listed[symbol][1])
                struct.pack_into("<Q", self.memory, where, self.base + value)
        return {name: self.base + value for name, value in listed if value}

    def _symbols(self, dynamic: dict[int, int]) -> list[tuple[str, int]]:
        found = []
        for index in range(struct.unpack_from("<I", self.memory, dynamic[4] + 4)[0]):  # of the hash table: all
            name, _, _, value, _ = struct.unpack_from("<IBxHQQ", self.memory, dynamic[6] + 24 * index)
            text = dynamic[5] + name
            found.append((self.memory[text : self.memory.find(b"\0", text)].decode(), value))
        return found

    def call(self, name: str, integers: list[int], floats: list[bytes]) -> None:
        """Run a function to its end; arguments by the procedure call standard, more than 8 on the stack."""
        stack = self.end + STACK - 4096
        for index, value in enumerate(integers[8:]):
            struct.pack_into("<Q", self.memory, stack - self.base + 8 * index, value & (1 << 64) - 1)
        for index, value in enumerate(integers[:8]):
            self.emulator.reg_write(self.names.UC_ARM64_REG_X0 + index, value & (1 << 64) - 1)
        for index, raw in enumerate(floats):
            self.emulator.reg_write(self.names.UC_ARM64_REG_V0 + index, int.from_bytes(raw, "little"))
        self.emulator.reg_write(self.names.UC_ARM64_REG_SP, stack)
        self.emulator.reg_write(self.names.UC_ARM64_REG_LR, self.end)
        self.emulator.emu_start(self.symbols[name], self.end)
        CALLED.add(name)


def address_of(memory: mmap.mmap) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class EmulatedLibrary:
    """The real library; while `avx2` is selected, the emulator runs its functions."""

    def __init__(self, real: native.Native, guest: Guest) -> None:
        self._real, self._guest, self._emulated = real, guest, False

    def zn_cpu_isa_select(self, name: bytes) -> int:
        self._emulated = name == b"avx2"
        if name == b"avx512":
            return -errno.ENOTSUP
        return 0 if self._emulated else int(self._real.lib.zn_cpu_isa_select(name))

    def zn_cpu_isa(self) -> Any:
        return self._real.ffi.new("char[]", b"avx2") if self._emulated else self._real.lib.zn_cpu_isa()

    def __getattr__(self, name: str) -> Any:
        there = getattr(self._real.lib, name)
        if not self._emulated or name not in self._guest.symbols:
            return there
        kind = self._real.ffi.typeof(there)
        return lambda *given: self._call(name, kind, given)

    def _call(self, name: str, kind: Any, given: tuple[Any, ...]) -> Any:
        ffi, integers, floats, kept = self._real.ffi, [], [], []
        for wanted, value in zip(kind.args, given, strict=True):
            if wanted.cname in ("float", "double"):
                floats.append(struct.pack("<f" if wanted.cname == "float" else "<d", value))
            elif wanted.kind == "pointer":
                made = ffi.new("char[]", value) if isinstance(value, bytes) else value
                kept.append(made)
                integers.append(int(ffi.cast("uintptr_t", made)))
            else:
                integers.append(int(value))
        self._guest.call(name, integers, floats)
        result = self._guest.emulator.reg_read(self._guest.names.UC_ARM64_REG_X0)
        if kind.result.kind == "void":
            return None
        if kind.result.kind == "pointer":
            return ffi.cast(kind.result, result)
        return int(ffi.cast(kind.result, result))


_folder = tempfile.TemporaryDirectory()
_load = native.load
_loaded = dataclasses.replace(_load(), lib=EmulatedLibrary(_load(), Guest(compiled(Path(_folder.name)))))


def load() -> native.Native:
    _load()  # which raises where the library was turned off
    return _loaded


native.load = load


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"emulated: {' '.join(sorted(CALLED))}")
