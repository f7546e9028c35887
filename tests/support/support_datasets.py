"""Small data sets in their official formats, complete and damaged, and an HTTP server that can interrupt a transfer."""

import gzip
import hashlib
import http.server
import io
import struct
import tarfile
import threading
from pathlib import Path

import numpy as np
from PIL import Image

CIFAR = "cifar-10-batches-bin"
CIFAR_NAMES = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
RECORD = 3073


def cifar_records(images=4, label=None, seed=0):
    records = np.random.default_rng(seed).integers(0, 256, (images, RECORD), dtype=np.uint8)
    records[:, 0] = np.arange(images) % 10 if label is None else label
    return records.tobytes()


def cifar_members():
    return {f"{CIFAR}/{name}": cifar_records(seed=seed) for seed, name in enumerate(CIFAR_NAMES)} | {
        f"{CIFAR}/batches.meta.txt": b"airplane\n"
    }


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()


def mnist_members(images=6, *, zipped=True):
    draw = np.random.default_rng(0)
    members = {}
    for part, count in (("train", images), ("t10k", 3)):
        members[f"{part}-images-idx3-ubyte"] = idx(draw.integers(0, 256, (count, 28, 28)))
        members[f"{part}-labels-idx1-ubyte"] = idx(np.arange(count) % 10)
    return {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in members.items()} if zipped else members


def jpeg(width=40, height=30, colour=(200, 100, 50), mode="RGB"):
    handle = io.BytesIO()
    Image.new(mode, (width, height), colour).save(handle, "JPEG")
    return handle.getvalue()


def imagenet_members(classes=("n00000001", "n00000002", "n00000003"), images=4):
    return {
        f"{split}/{name}/{name}_{number}.JPEG": jpeg(40 + number, 30, (80 * place, 100, 50 + number))
        for split, count in (("train", images), ("val", 1))
        for place, name in enumerate(classes)
        for number in range(count)
    }


def put(folder: Path, members):
    for name, content in members.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def tar(path: Path, members, *more, zipped=True):
    """Write a tar archive.

    members: file name -> its bytes. more: TarInfo objects, or pairs (TarInfo, bytes), that are added at the end of the archive.
    """
    with tarfile.open(path, "w:gz" if zipped else "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        for one in more:
            info, content = one if isinstance(one, tuple) else (one, b"")
            archive.addfile(info, io.BytesIO(content))
    return path


def sha256(path: Path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Server:
    """An HTTP server for one file, which supports the headers Range and ETag.

    cuts: the server closes the connection of its n-th answer after `cuts[n]` bytes. `asked` contains the Range header of each
    request, and `sent` the number of bytes of each answer. redirect: the URL to which every request is redirected, or None.
    """

    def __init__(self, content: bytes, cuts=(), *, ranges=True) -> None:
        self.content, self.cuts, self.asked, self.sent, self.etag = content, list(cuts), [], [], '"one"'
        self.redirect = None
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                asked = self.headers.get("Range")
                server.asked.append(asked)
                if server.redirect:
                    self.send_response(302)
                    self.send_header("Location", server.redirect)
                    self.end_headers()
                    return
                begin = 0
                if asked and ranges and self.headers.get("If-Range", server.etag) == server.etag:
                    begin = int(asked.removeprefix("bytes=").removesuffix("-"))
                if begin >= len(server.content):
                    self.send_error(416)
                    return
                body = server.content[begin:]
                self.send_response(206 if begin else 200)
                if begin:
                    self.send_header("Content-Range", f"bytes {begin}-{len(server.content) - 1}/{len(server.content)}")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", server.etag)
                self.end_headers()
                cut = server.cuts.pop(0) if server.cuts else None
                server.sent.append(len(body[:cut]))
                self.wfile.write(body[:cut])

            def log_message(self, *_):
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/set.tar.gz"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
