"""Local relay to JAX's coordinator, so that its death does not abort this process at once.

JAX's client ends a process by SIGABRT about a tenth of a second after its connection to process 0
broke: before a reason can be written. Over this relay the connection stays open and only falls
silent; the channel between the processes names the loss and ends the process.
"""

import asyncio
import contextlib
import threading

_CHUNK = 1 << 16


class Relay:
    """Listens on a loopback port of this machine and passes everything on to one address.

    Attributes:
      port: the port it listens on.
    """

    def __init__(self, host: str, port: int) -> None:
        """Starts the thread that relays to HOST:PORT; it ends with the program."""
        self.port = 0
        self._target = (host, port)
        self._listening = threading.Event()
        threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="jaxtrain-relay", daemon=True
        ).start()
        self._listening.wait()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        async with server:
            await server.serve_forever()

    async def _carry(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """One connection; it ends when this side ends it, whatever the far side does."""
        with contextlib.closing(back):
            try:
                far, there = await asyncio.open_connection(*self._target)
            except OSError:
                # Not up yet: closed, so that the caller tries again.
                return
            answers = asyncio.create_task(_pass_on(far, back))
            with contextlib.closing(there):
                await _pass_on(near, there)
                # The far side's end alone is not passed on: this is what the relay is for.
                await _until_end(near)
            answers.cancel()


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(_CHUNK):
            sink.write(data)
            await sink.drain()


async def _until_end(source: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await source.read(_CHUNK):
            pass
