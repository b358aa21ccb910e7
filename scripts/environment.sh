# Sourced by scripts/quickstart, scripts/test and .ci/run: makes .venv once and keeps it up to date.
#
#   environment_prepare EXTRA   afterwards .venv has the project with that extra and current native libraries
#
# PYTHON names the interpreter to build .venv with (3.10 or newer); default: the first that fits on PATH.

TORCH_REQUIREMENT="torch==2.13.0"

environment_fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

environment_python_fits() {
  command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

# Prints the interpreter to use, or explains what is missing.
environment_find_python() {
  local candidate
  if [[ -n "${PYTHON:-}" ]]; then
    command -v "$PYTHON" >/dev/null 2>&1 || environment_fail "PYTHON=$PYTHON: no such command"
    environment_python_fits "$PYTHON" ||
      environment_fail "PYTHON=$PYTHON is $("$PYTHON" -V 2>&1), needs Python 3.10 or newer; point PYTHON at another one"
    echo "$PYTHON"
    return
  fi
  for candidate in python3 python python3.13 python3.12 python3.11 python3.10 python3.14; do
    if environment_python_fits "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  environment_fail "no Python 3.10 or newer on PATH (python3 is $(python3 -V 2>&1 || true)); install one or set PYTHON"
}

# A venv left by a broken run, or whose interpreter has gone, is made again.
environment_make_venv() {
  if [[ -x "$VENV/bin/python" ]] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    return
  fi
  local python
  python="$(environment_find_python)"
  "$python" -c 'import venv, ensurepip' 2>/dev/null ||
    environment_fail "$python has no venv module; install it (Debian, Ubuntu: apt install python3-venv) or set PYTHON"
  echo "making $VENV with $("$python" -V)"
  "$python" -m venv --clear "$VENV"
}

# Changes when something that pip or the compiler would act on has changed.
environment_packages_hash() {
  cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" "$ROOT/setup.py" "$ROOT/scripts/environment.sh" | sha256sum
}

environment_native_hash() {
  find "$ROOT/native" -type f \( -name '*.py' -o -name '*.[ch]' -o -name '*.inc' -o -name '*.cu' -o -name '*.cuh' \) \
    -print0 | sort -z | xargs -0 sha256sum | sha256sum
}

environment_is_stamped() {
  [[ -f "$1" && "$(<"$1")" == "$2" ]]
}

environment_install() {
  local extra="$1"
  echo "installing zero-infinity[$extra] into $VENV (once; a minute or more)"
  # torch first and by itself: it is the large download, and a later failure does not repeat it.
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c "$ROOT/constraints.txt" "$TORCH_REQUIREMENT"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c "$ROOT/constraints.txt" -e "$ROOT[$extra]"
}

# The Python fallbacks run without a compiler, so a failure here costs speed and is no reason to stop.
environment_build_native() {
  if (cd "$ROOT" && "$VENV/bin/python" -m native.build); then
    echo "$1" >"$VENV/.native"
  else
    echo "warning: the native libraries could not be built; slower Python fallbacks will be used" >&2
  fi
}

environment_prepare() {
  local extra="$1" packages native build=""
  ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
  VENV="$ROOT/.venv"
  # Two scripts started at once would otherwise install into one another's feet.
  if command -v flock >/dev/null 2>&1; then
    exec 9<"$ROOT"
    flock 9
  fi
  environment_make_venv
  # The compilers need no package, so they work beside pip.
  native="$(environment_native_hash)"
  if ! environment_is_stamped "$VENV/.native" "$native"; then
    environment_build_native "$native" &
    build="$!"
  fi
  packages="$(environment_packages_hash)"
  if ! environment_is_stamped "$VENV/.installed-$extra" "$packages"; then
    environment_install "$extra"
    echo "$packages" >"$VENV/.installed-$extra"
  fi
  [[ -z "$build" ]] || wait "$build"
  if command -v flock >/dev/null 2>&1; then
    exec 9<&-
  fi
}
