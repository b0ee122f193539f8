#!/bin/bash
# compute-sanitizer (memcheck, racecheck, synccheck) over small launches of every kind of kernel, on one sm_90 GPU.
#   bash tests/sanitizer/run.sh REPORT [SECONDS [GROUPS]]
# First each group runs without a tool: Triton's cache, and results that the tools' runs must equal bit for bit.  Then
# all run at once.  What still runs after SECONDS (140) is ended, and named.  Planted errors show that the tools see any.
set -u
here=$(cd "$(dirname "$0")" && pwd); report=${1:?the file of the report}; end=$(( $(date +%s) + ${2:-140} ))
work=$(mktemp -d); logs=$work/logs; kept=$work/kept; mkdir -p "$logs" "$kept"; trap 'rm -rf "$work"' EXIT
export PYTHONPATH="$here/../kit${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=$work/triton OMP_NUM_THREADS=2
left() { local n=$(( end - $(date +%s) )); echo $(( n > 1 ? n : 1 )); }
# the tools follow one process: no wrapper before it
python=$(python3 -c "import sys; print(sys.executable)")
tool=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
nvcc=$(command -v nvcc || ls /usr/local/cuda*/bin/nvcc 2>/dev/null | head -1)
[ -n "$tool" ] || { echo "compute-sanitizer is not on the PATH, nor in /usr/local/cuda"; exit 2; }
help=$($tool --help 2>&1)
option() { grep -q -- "$1" <<<"$help" && echo "$1 ${2:-}"; }
common="$(option --target-processes application-only) $(option --show-backtrace device) $(option --print-limit 200)"
groups=${3:-hopper words tiles ops gemv} # the longest first
$nvcc -arch=sm_90 -lineinfo -o "$work/planted" "$here/planted.cu" >"$work/nvcc.log" 2>&1 || tail -3 "$work/nvcc.log" &
for group in $groups; do
  timeout "$(left)" "$python" "$here/launches.py" $group "$kept" >"$work/warm-$group" 2>&1 &
done
timeout "$(left)" "$python" "$here/planted.py" >"$work/warm-planted" 2>&1 &
wait
for group in $groups; do tail -1 "$work/warm-$group" | cut -c1-200; grep PROBLEM "$work/warm-$group" | cut -c1-250; done
number=0
under() { # tool, name, command
  local which=$1 name=$2; shift 2; number=$(( number + 1 ))
  local port="$(option --port $(( 49152 + 20 * number )))"
  (PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -k 2 "$(left)" "$tool" --tool $which $common $port \
    --log-file "$logs/$which-$name.log" "$@" >"$logs/$which-$name.out" 2>&1; touch "$logs/$which-$name.log") &
}
for group in $groups; do
  for which in racecheck memcheck synccheck; do
    under $which $group "$python" "$here/launches.py" $group "$kept"
  done
done
under memcheck planted "$python" "$here/planted.py"
under memcheck bounds "$work/planted" bounds
under racecheck race "$work/planted" race
under synccheck sync "$work/planted" sync
wait
"$python" "$here/summary.py" "$logs" "$report"
