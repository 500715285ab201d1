"""A slow link: passes TCP connections on, each byte later by the same time in each direction.

    python -m tests.ssh.relay ADDRESS:PORT TO-ADDRESS:PORT DELAY_S

This kernel may have no netem. What it cannot show is what a long way does to TCP itself: each side's own TCP
connection ends here. What it does show is every round trip that a protocol above TCP waits for.
"""

import asyncio
import contextlib
import sys
from collections import deque

BLOCK = 1 << 16
UNDER_WAY = 64 << 20
"""More bytes than the fastest link that is tried holds."""


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Passes on what comes, and the end of it, each after ``delay_s``."""
    clock = asyncio.get_running_loop().time
    queue: deque[tuple[float, bytes]] = deque()
    came, held = asyncio.Event(), 0

    async def take() -> None:
        nonlocal held
        data = b"-"
        while data:
            with contextlib.suppress(ConnectionError):
                data = await reader.read(BLOCK)
            queue.append((clock() + delay_s, data))
            held += len(data)
            came.set()
            while held > UNDER_WAY:
                await asyncio.sleep(delay_s / 10)

    taking = asyncio.create_task(take())
    try:
        while True:
            while not queue:
                came.clear()
                await came.wait()
            due, data = queue.popleft()
            held -= len(data)
            await asyncio.sleep(max(0.0, due - clock()))
            if not data:
                break
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        taking.cancel()
        with contextlib.suppress(OSError):
            writer.write_eof()


async def serve(listen: str, to: str, delay_s: float) -> None:
    """Serves for ever."""
    address, _, port = to.rpartition(":")

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2 * delay_s)  # as long as the connection itself takes to be made
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(address, int(port))
            await asyncio.gather(_pass_on(reader, far_writer, delay_s), _pass_on(far_reader, writer, delay_s))
            far_writer.close()
        writer.close()

    host, _, own = listen.rpartition(":")
    server = await asyncio.start_server(handle, host, int(own))
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], float(sys.argv[3])))
