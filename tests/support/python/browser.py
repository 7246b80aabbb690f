"""Runs a real browser without a window, for tests of the server's pages."""

import shutil
import struct
import zlib

from selenium import webdriver

# Returns the elements beyond the right edge of the window, which a user would have to scroll to.
OVERFLOWING = """
const width = document.documentElement.clientWidth;
return [...document.querySelectorAll('body, body *')]
  .filter(e => e.getClientRects().length && e.getBoundingClientRect().right > width + 0.5)
  .map(e => e.tagName + ': ' + e.textContent.slice(0, 40));
"""
# Returns the contrast of each text with its background by WCAG's formula, lowest first.
CONTRASTS = """
const rgb = text => text.match(/[\\d.]+/g).map(Number);
const linear = c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const light = c => 0.2126 * linear(c[0]) + 0.7152 * linear(c[1]) + 0.0722 * linear(c[2]);
const behind = e => {
  for (; e; e = e.parentElement) {
    const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c;
  }
  return [255, 255, 255];
};
return [...document.querySelectorAll('body *')]
  .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
  .filter(e => e.getClientRects().length && !e.closest('svg'))
  .map(e => {
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(behind(e))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    return [contrast, e.tagName + '.' + e.className + ': ' + e.textContent.slice(0, 40)];
  })
  .sort((a, b) => a[0] - b[0]);
"""


class Browser:
    """Debian's chromium. Use it as a context manager."""

    def __enter__(self) -> "Browser":
        program, driver = shutil.which("chromium"), shutil.which("chromedriver")
        assert program and driver, (
            "chromium or chromedriver is missing: install the packages chromium and chromium-driver"
        )
        options = webdriver.ChromeOptions()
        options.binary_location = program
        # Tests also run as root, where the sandbox does not work. The browser opens only our own pages.
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"):
            options.add_argument(argument)
        options.add_argument("--disable-dev-shm-usage")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.quit()

    def open(self, url: str, width: int, *, is_dark: bool = False) -> None:
        """Shows a page in a window of this width. Drops what an earlier page wrote to the console."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get_log("browser")
        self.driver.get(url)

    def run(self, script: str):
        """Returns the result of a JavaScript function body that runs in the page."""
        return self.driver.execute_script(script)

    def text(self, selector: str = "body") -> str:
        """Returns the rendered text of the first match."""
        return self.run(f"return document.querySelector({selector!r}).innerText")

    def texts(self, selector: str) -> list[str]:
        """Returns the rendered text of each match."""
        return self.run(
            f"return [...document.querySelectorAll({selector!r})].map(e => e.innerText)"
        )

    def widths(self, selector: str) -> list[float]:
        """Returns the rendered widths of the matches in pixels."""
        return self.run(
            f"return [...document.querySelectorAll({selector!r})]"
            ".map(e => e.getBoundingClientRect().width)"
        )

    def console(self) -> list[dict]:
        """Returns what the page wrote to the console, including the browser's own messages."""
        return self.driver.get_log("browser")

    def picture(self) -> tuple[int, int, int]:
        """Returns a screenshot's width, height, and number of different lines of pixels."""
        png = self.driver.get_screenshot_as_png()
        width, height = struct.unpack(">II", png[16:24])
        data, at = b"", 8
        while at < len(png):
            (length,) = struct.unpack(">I", png[at : at + 4])
            if png[at + 4 : at + 8] == b"IDAT":
                data += png[at + 8 : at + 8 + length]
            at += 12 + length
        lines = zlib.decompress(data)
        stride = len(lines) // height
        return width, height, len({lines[y * stride : (y + 1) * stride] for y in range(height)})
