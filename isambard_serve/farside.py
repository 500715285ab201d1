"""The far side of a collection: lists a run directory, and sends files of it through its own standard output.

``transfer`` sends this file, as it is, to the ``python3`` of a login node: nothing need be installed there, and the two
sides are always of one version. So it uses the standard library alone, and no syntax newer than Python 3.6's, which is
what SUSE Linux Enterprise 15 calls ``python3``.

Standard input brings questions, one JSON object a line::

    {"list": ROOT, "exclude": [PATTERN, …]}                        what is there?
    {"root": ROOT, "send": [[PATH, SIZE, MTIME_NS, INODE, START, SHA-256], …]}     send these, in this order

Standard output is blocks: two lengths, of the block and of what follows, and the block itself, compressed by zlib if
the second length is the smaller one. The blocks' contents are one stream of answers::

    to list:  ENTRY and the path for each regular file; a path of length 0 ends it
    to send:  FILE for each file; if its state is SENT: pieces, each after its length; length 0; the SHA-256 of the
              file's first SIZE bytes

Of a file that is still the one that was listed, its first SIZE bytes are sent: it may have grown since. One that was
replaced since is sent as it is now. The first START bytes are left out if their SHA-256 is the one in the question.
"""

import contextlib
import errno
import fcntl
import fnmatch
import hashlib
import json
import os
import queue
import stat
import struct
import sys
import threading
import time
import zlib
from typing import Any, BinaryIO, Callable, Dict, Iterable, Iterator, List, Optional, Tuple, Union

LENGTHS = struct.Struct(">II")
ENTRY = struct.Struct(">HQqIQ")
"""Of a listed file: the path's length in bytes, its size, mtime in ns, mode, inode."""
FILE = struct.Struct(">BQQq")
"""Of a sent file: its state, the offset at which its pieces begin, its size, mtime in ns."""
PIECE = struct.Struct(">I")
DIGEST = 32
"""The length of a SHA-256."""
SENT, GONE, UNREADABLE = range(3)

BLOCK = 1 << 20
"""The most bytes that a block can have."""
BUFFERS = 4
READ = 1 << 18
F_SETPIPE_SZ = 1031
"""As linux/fcntl.h has it: Python's own name for it is younger than some Pythons there."""

SECRETS = frozenset(["api.key"])
"""Names of files that never leave the cluster."""

LEVEL = 1
PROBE = 1 << 16
UNTRIED = 16
"""How many blocks are sent as they are, once compression did not pay, before it is tried again."""
SLOW_S = 1e-7
"""What a link is taken for at first, in seconds a byte: its buffers swallow the first blocks at once."""
FAST_S = 4e-9
"""At this and less, the pipe to sshd is what holds it up."""


def wanted(path: str, exclude: Iterable[str] = ()) -> bool:
    """Whether the file ``path`` (relative, with slashes) may be collected: no key, not half-written, not excluded."""
    name = path.rpartition("/")[2]
    if name.lower() in SECRETS or name.endswith(".tmp"):
        return False
    return not any(fnmatch.fnmatchcase(path, pattern) for pattern in exclude)


def walk(root: str, exclude: Iterable[str] = ()) -> Iterator[Tuple[str, Optional[os.stat_result]]]:
    """The regular files below ``root``, in order, as relative paths. No link is followed, to a file or a folder.

    What may not be looked at, a folder or what is in it, is among them without a status.

    Raises:
        OSError: ``root`` is no folder, or cannot be read.
    """
    patterns = tuple(exclude)
    closed: List[str] = []

    def onerror(error: OSError) -> None:
        if error.filename == root or not isinstance(error, (FileNotFoundError, PermissionError)):
            raise error
        if isinstance(error, PermissionError):
            closed.append(os.path.relpath(error.filename, root))

    for folder, folders, names in os.walk(root, onerror=onerror):
        inside = os.path.relpath(folder, root)
        prefix = "" if inside == "." else inside + "/"
        folders[:] = sorted(name for name in folders if not _left_out(prefix + name + "/", patterns))
        for name in sorted(names):
            path = prefix + name
            if not wanted(path, patterns):
                continue
            try:
                status = os.lstat(os.path.join(folder, name))
            except FileNotFoundError:  # gone since
                continue
            except PermissionError:
                closed.append(path)
                continue
            if stat.S_ISREG(status.st_mode):
                yield path, status
    for path in closed:
        if wanted(path, patterns):
            yield path, None


def _left_out(folder: str, exclude: Iterable[str]) -> bool:
    """Whether all that may be in ``folder`` (with its slash) is excluded: it need not be looked at."""
    return any(pattern.endswith("*") and fnmatch.fnmatchcase(folder, pattern) for pattern in exclude)


class Outlet:
    """The blocks on ``sink``. A thread compresses and writes one while the next is read and hashed.

    Blocks lie in a few buffers that are used again and again: new memory for each would cost as much as hashing it.

    Args:
        lost: called by that thread when nobody reads any more.
        fast: called by it once, when the link looks like a fast one.
    """

    def __init__(self, sink: BinaryIO, lost: Callable[[], None], fast: Callable[[], None] = lambda: None) -> None:
        self._sink = sink
        self._lost = lost
        self._fast: Optional[Callable[[], None]] = fast
        self._squeeze = Squeeze()
        self._free: queue.Queue[memoryview] = queue.Queue()
        self._full: queue.Queue[Optional[Tuple[memoryview, int]]] = queue.Queue()
        for _ in range(BUFFERS):
            self._free.put(memoryview(bytearray(BLOCK)))
        self._block = self._free.get()
        self._used = 0
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def put(self, data: bytes) -> None:
        """Adds ``data``, which is much shorter than a block, to the stream."""
        self._need(len(data))
        self._block[self._used:self._used + len(data)] = data
        self._used += len(data)

    def put_piece(self, file: BinaryIO, most: int) -> memoryview:
        """Adds the next bytes of ``file`` as a piece, ``most`` at most, and returns them; none at its end.

        They stay as they are until the next call.
        """
        self._need(PIECE.size + 1)
        start = self._used + PIECE.size
        count = file.readinto(self._block[start:start + most])  # type: ignore[attr-defined]
        if count:
            PIECE.pack_into(self._block, self._used, count)
            self._used = start + count
        return self._block[start:start + count]

    def flush(self) -> None:
        """Gives on what has been added so far."""
        if self._used:
            self._full.put((self._block, self._used))
            self._block, self._used = self._free.get(), 0

    def close(self) -> None:
        """Returns once all is written."""
        self.flush()
        self._full.put(None)
        self._writer.join()

    def _need(self, count: int) -> None:
        if self._used + count > BLOCK:
            self.flush()

    def _write(self) -> None:
        try:
            for block, used in iter(self._full.get, None):
                packed = self._squeeze(block[:used])
                began = time.perf_counter()
                self._sink.write(LENGTHS.pack(used, len(packed)))
                self._sink.write(packed)
                self._sink.flush()
                self._squeeze.note_link(len(packed), time.perf_counter() - began)
                if self._fast and self._squeeze.link_s < FAST_S:
                    self._fast()
                    self._fast = None
                self._free.put(block)
        except OSError:
            self._lost()


def thread_s() -> float:
    """The processor time of this thread, in seconds."""
    return time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID)


class Squeeze:
    """Compresses a block where that gets it there sooner: where it takes less time than the link saves by it.

    The link's time a byte is what writing one takes. A link that is faster than the compressor gets blocks as they
    are, and content that does not shrink is only probed now and then. The compressor's time is the processor's: by the
    wall's clock, one turn of somebody else's in the middle of a probe would look as if compression did not pay.

    Attributes:
        link_s: the link's time a byte, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = thread_s) -> None:
        self._clock = clock
        self.link_s = SLOW_S
        self._untried = 0

    def __call__(self, block: memoryview) -> "Union[bytes, memoryview]":
        """``block``, compressed if that pays."""
        if self._untried:
            self._untried -= 1
            return block
        packed = b""
        for part in (block[:PROBE], block) if len(block) > PROBE else (block,):
            began = self._clock()
            packed = zlib.compress(part, LEVEL)
            if self._clock() - began > (len(part) - len(packed)) * self.link_s:
                self._untried = UNTRIED
                return block
        return packed

    def note_link(self, count: int, took_s: float) -> None:
        """Takes in that writing ``count`` bytes took ``took_s`` seconds."""
        self.link_s += 0.2 * min(1.0, count / PROBE) * (took_s / count - self.link_s)


class Folder:
    """Opens files below ``root``, never through a link. One folder stays open: the next file is often in it too."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._inside = ""
        self._descriptor: Optional[int] = None

    def open(self, path: str) -> int:
        """A file descriptor of ``path``, whatever kind of file it is. Raises OSError."""
        inside, _, name = path.rpartition("/")
        if self._descriptor is None or inside != self._inside:
            self.close()
            self._descriptor, self._inside = self._descend(inside), inside
        # Without waiting: a named pipe may stand there now.
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._descriptor)

    def close(self) -> None:
        """Closes the folder that is open."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _descend(self, inside: str) -> int:
        folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        for part in inside.split("/") if inside else ():
            outer = folder
            try:
                folder = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=outer)
            finally:
                os.close(outer)
        return folder


def send_listing(out: Outlet, root: str, exclude: Iterable[str]) -> None:
    """Answers what there is below ``root``. Raises OSError as ``walk`` does.

    What may not be looked at is listed like an empty file: whoever asks for it will hear that it cannot be read.
    """
    for path, status in walk(root, exclude):
        name = os.fsencode(path)
        told = (0, 0, stat.S_IFREG, 0)
        if status:
            told = (status.st_size, status.st_mtime_ns, status.st_mode, status.st_ino)
        out.put(ENTRY.pack(len(name), *told) + name)
    out.put(ENTRY.pack(0, 0, 0, 0, 0))


def send_file(out: Outlet, descriptor: int, listed: Tuple[int, int, int], start: int, digest: str) -> None:
    """Sends the open file ``descriptor``, which was ``listed`` with this size, mtime and inode."""
    with open(descriptor, "rb", buffering=0) as file:
        now = os.fstat(descriptor)
        if not stat.S_ISREG(now.st_mode):
            out.put(FILE.pack(GONE, 0, 0, 0))
            return
        size, mtime_ns, inode = listed
        if now.st_ino != inode or now.st_size < size:
            size, mtime_ns = now.st_size, now.st_mtime_ns
        total = hashlib.sha256()
        if start > size or not _begins_with(file, start, digest, total):
            start, total = 0, hashlib.sha256()
            file.seek(0)
        out.put(FILE.pack(SENT, start, size, mtime_ns))
        left = size - start
        while left:
            piece = out.put_piece(file, left)
            if not piece:  # it has shrunk under our hands; the other side sees that bytes are missing
                break
            total.update(piece)
            left -= len(piece)
        out.put(PIECE.pack(0) + total.digest())


def _begins_with(file: BinaryIO, start: int, digest: str, total: Any) -> bool:
    """Whether the first ``start`` bytes have this SHA-256; ``total`` takes them in."""
    left = start
    while left:
        piece = file.read(min(left, READ))
        if not piece:
            return False
        total.update(piece)
        left -= len(piece)
    return not start or total.hexdigest() == digest


def answer(out: Outlet, question: Dict[str, Any]) -> None:
    """Answers one question. Raises OSError where the run's folder cannot be read."""
    if "list" in question:
        send_listing(out, question["list"], question["exclude"])
    else:
        folder = Folder(question["root"])
        for path, size, mtime_ns, inode, start, digest in question["send"]:
            try:
                descriptor = folder.open(path)
            except OSError as error:
                gone = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
                out.put(FILE.pack(GONE if gone else UNREADABLE, 0, 0, 0))
                continue
            send_file(out, descriptor, (size, mtime_ns, inode), start, digest)
        folder.close()
    out.flush()


def widen(descriptor: int) -> None:
    """Lets a pipe hold a whole block: sshd then reads it in few large gulps, while the next one is made.

    Where the link is slow, what a wide pipe swallows at once would make it look fast, and compression not pay.
    """
    with contextlib.suppress(OSError):  # it is no pipe, or its user has no more wide ones
        fcntl.fcntl(descriptor, F_SETPIPE_SZ, BLOCK)


def main() -> int:
    """Answers questions until there are no more; returns the exit code."""
    out = Outlet(sys.stdout.buffer, lost=lambda: os._exit(1), fast=lambda: widen(1))
    try:
        for line in sys.stdin.buffer:
            answer(out, json.loads(line.decode()))
    except OSError as error:
        sys.stderr.write(f"{error.filename}: {error.strerror}\n")
        return 1
    out.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
