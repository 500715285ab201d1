# What a login node is like, one "key value" a line: for deploy, which sends this to bash there. Its arguments are
# paths that tell one site from another.
echo "look begins"
echo "home $HOME"
for path in "$@"; do
    if test -e "$path"; then echo "exists $path"; fi
done
for link in "$HOME"/.local/share/isambard-serve/versions/*; do
    if test -L "$link"; then echo "version ${link##*/}"; fi
done

# The memory that one user may have: the slice's limit, less what is in use; or what the machine has left.
slice="/sys/fs/cgroup/user.slice/user-$(id -u).slice"
limit=$(cat "$slice/memory.max" 2>/dev/null || echo max)
used=$(cat "$slice/memory.current" 2>/dev/null || echo 0)
left=$(($(sed -n 's/^MemAvailable: *\([0-9]*\) kB$/\1/p' /proc/meminfo) * 1024))
if test "$limit" != max && test $((limit - used)) -lt "$left"; then left=$((limit - used)); fi
echo "memory $left"

# The first Python that is new enough and can make environments: on the PATH, of a module, or one that uv has or gets.
facts='import sys, venv, ensurepip, platform
if sys.version_info < (3, 11): sys.exit(1)
print("python", sys.executable)
print("tag", "%d.%d" % sys.version_info[:2])
print("full", platform.python_version())
print("machine", platform.machine())
print("glibc", platform.libc_ver()[1])'
for python in python3.14 python3.13 python3.12 python3.11 python3; do
    if command -v "$python" >/dev/null && "$python" -c "$facts" 2>/dev/null; then exit 0; fi
done
if type module >/dev/null 2>&1 && module load cray-python >/dev/null 2>&1 && python3 -c "$facts" 2>/dev/null; then exit 0; fi
for uv in uv "$HOME/.local/bin/uv"; do
    if command -v "$uv" >/dev/null; then
        "$uv" python find '>=3.11' >/dev/null 2>&1 || "$uv" python install --quiet 3.12 >/dev/null 2>&1
        python=$("$uv" python find '>=3.11' 2>/dev/null)
        if test -n "$python" && "$python" -c "$facts" 2>/dev/null; then exit 0; fi
    fi
done
