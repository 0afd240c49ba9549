"""A headless Chromium, driven by its own protocol: opens pages, takes pictures, checks that all labels are readable.

    async with Browser() as browser:
        page = await browser.page(1366, 768, dark=True)
        await page.goto(url)
        await page.screenshot("page.png")

Debian's package `chromium` is enough; nothing else needs to be installed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Self

import aiohttp

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--remote-debugging-port=0", "--remote-allow-origins=*", "--force-color-profile=srgb",
)  # fmt: skip
START_S = 60.0
WAIT_S = 60.0


def find_chromium() -> str | None:
    paths = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    return next(filter(None, paths), None)


class PageError(Exception):
    """The browser could not do what it was asked."""


class Browser:
    """One process with a profile of its own; it ends with the `with` block."""

    async def __aenter__(self) -> Self:
        path = find_chromium()
        if path is None:
            raise PageError("there is no chromium here: apt-get install chromium")
        self._stack = contextlib.AsyncExitStack()
        # The browser writes into its profile until the very end.
        self._profile = self._stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        self._process = await asyncio.create_subprocess_exec(
            path, *FLAGS, f"--user-data-dir={self._profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        self._stack.push_async_callback(self._end)
        try:
            session = await self._stack.enter_async_context(aiohttp.ClientSession())
            self._socket = await session.ws_connect(await self._address(), max_msg_size=0, heartbeat=None)
        except BaseException:
            await self._stack.aclose()
            raise
        self._next, self._answers, self._pages = 0, {}, {}
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        await self._socket.close()
        await self._stack.aclose()

    async def _end(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), 10)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    async def _address(self) -> str:
        """Chromium says on which port it listens once it does."""
        said = Path(self._profile) / "DevToolsActivePort"
        async with asyncio.timeout(START_S):
            while not (said.exists() and said.read_text().count("\n")):
                if self._process.returncode is not None:
                    raise PageError(f"chromium ended at once, with status {self._process.returncode}")
                await asyncio.sleep(0.05)
        port, path = said.read_text().split("\n")[:2]
        return f"ws://127.0.0.1:{port}{path}"

    async def _read(self) -> None:
        async for message in self._socket:
            found = json.loads(message.data)
            if "id" in found:
                self._answers.pop(found["id"]).set_result(found)
            elif (page := self._pages.get(found.get("sessionId"))) is not None:
                page.note(found["method"], found["params"])

    async def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._next += 1
        answer = self._answers[self._next] = asyncio.get_running_loop().create_future()
        message: dict[str, Any] = {"id": self._next, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        await self._socket.send_str(json.dumps(message))
        found = await asyncio.wait_for(answer, WAIT_S)
        if "error" in found:
            raise PageError(f"{method}: {found['error']['message']}")
        return dict(found["result"])

    async def page(self, width: int = 1366, height: int = 768, *, dark: bool = False, scale: float = 1.0) -> Page:
        target = (await self.send("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.send("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Network", "Log"):
            await page.send(f"{domain}.enable")
        await page.resize(width, height, scale=scale)
        await page.theme(dark)
        return page

    async def close_pages(self) -> None:
        for page in [*self._pages.values()]:
            await page.close()


class Page:
    """One tab. `errors` are what its console complained about, `requests` every address it asked for."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.send(method, self._session, **params)

    def note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(each.get("value", each.get("description"))) for each in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    async def resize(self, width: int, height: int, *, scale: float = 1.0) -> None:
        self._size = (width, height)
        await self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                        mobile=False)  # fmt: skip

    async def theme(self, dark: bool) -> None:
        value = "dark" if dark else "light"
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    async def goto(self, url: str) -> None:
        await self.send("Page.navigate", url=url)
        await self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def evaluate(self, expression: str) -> Any:
        found = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description") or details["text"])
        return found["result"].get("value")

    async def wait_for(self, expression: str, timeout_s: float = WAIT_S) -> Any:
        """The expression's value once it is true."""
        async with asyncio.timeout(timeout_s):
            asked = f"((found) => found instanceof Node || found instanceof Function || found)({expression})"
            while not (value := await self.evaluate(asked)):
                await asyncio.sleep(0.05)
        return value

    async def screenshot(self, path: str | Path, *, full: bool = True) -> Path:
        """A picture of the window, or of all of the page."""
        width, height = self._size
        if full:
            height = max(height, int(await self.evaluate("document.documentElement.scrollHeight")))
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        found = await self.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=full)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))
        return path

    async def unreadable(self) -> list[str]:
        """Labels that are cut, reach out of the page, or lie on each other."""
        return list(await self.evaluate(_UNREADABLE))

    async def close(self) -> None:
        await self._browser.send("Target.closeTarget", targetId=self._target)
        self._browser._pages.pop(self._session)


_UNREADABLE = r"""
(() => {
  const found = [], boxes = [];
  const width = document.documentElement.clientWidth;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const text = node.textContent.trim(), parent = node.parentElement;
    if (!text || parent.closest("option, title, script, style, noscript")) continue;
    if (!parent.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    // A name that ends in … is short on purpose, where hovering tells all of it.
    const shortened = getComputedStyle(parent).textOverflow === "ellipsis" && parent.title.trim() === text;
    const rects = shortened ? [parent.getBoundingClientRect()] : range.getClientRects();
    for (const box of rects) {
      if (box.width < 1 || box.height < 1) continue;
      if (box.left < -1 || box.right > width + 1) found.push(`"${text}" reaches out of the page`);
      for (let up = parent; up && up !== document.body; up = up.parentElement) {
        const style = getComputedStyle(up);
        if (up instanceof SVGElement || style.overflow === "visible") continue;
        if (["auto", "scroll"].includes(style.overflowX)) break;
        const outer = up.getBoundingClientRect();
        const across = box.left < outer.left - 1 || box.right > outer.right + 1;
        if (across || box.top < outer.top - 2 || box.bottom > outer.bottom + 2)
          found.push(`"${text}" is cut by its ${up.className || up.tagName}`);
      }
      const frame = parent.closest(".pp-tile, .pp-panel, .pp-banner, button")?.getBoundingClientRect();
      if (frame && (box.left < frame.left + 3 || box.right > frame.right - 3 || box.bottom > frame.bottom + 2))
        found.push(`"${text}" reaches out of its frame`);
      // Lines of text are higher than their letters: what lies within that is no overlap.
      const slack = Math.min(4, box.height * 0.2);
      boxes.push({text, node, l: box.left + 1, r: box.right - 1, t: box.top + slack, b: box.bottom - slack});
    }
  }
  for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
    const a = boxes[i], b = boxes[j];
    if (a.node !== b.node && a.l < b.r && b.l < a.r && a.t < b.b && b.t < a.b)
      found.push(`"${a.text}" lies on "${b.text}"`);
  }
  return found;
})()
"""
