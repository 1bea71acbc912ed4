"""Files of images, as trainers read them and jobs check them. Imports no torch."""

import io
from contextlib import suppress

from PIL import Image as Pictures
from PIL import ImageOps

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
MAX_PIXELS = 1 << 26  # per file, before resizing


def opened(content: bytes) -> Pictures.Image:
    """As vLLM opens it: upright, in RGB, on white where it is transparent. Raises ValueError."""
    try:
        image: Pictures.Image = Pictures.open(io.BytesIO(content), formats=FORMATS)
        width, height = image.size
        if width * height <= MAX_PIXELS:
            with suppress(Exception):  # as vLLM does with metadata that it cannot read
                image = ImageOps.exif_transpose(image)
            image.load()
    except Exception as error:  # PIL's decoders raise many kinds for a damaged file
        raise ValueError(
            f"expected an image file ({', '.join(FORMATS)}), got {len(content)} bytes that are none: {error}"
        ) from error
    if width * height > MAX_PIXELS:
        raise ValueError(f"expected an image of at most {MAX_PIXELS} pixels, got {width} x {height}")
    if image.mode != "RGBA":
        return image.convert("RGB")
    made = Pictures.new("RGB", image.size, (255, 255, 255))
    made.paste(image, mask=image.split()[3])
    return made
