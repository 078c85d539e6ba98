"""Put a virtual environment on top of this one (`python overlay.py DIRECTORY`): its packages have priority."""

import sys
import sysconfig
from pathlib import Path

below = sysconfig.get_path("purelib")
above = sysconfig.get_path("purelib", vars={"base": sys.argv[1]})
Path(above, "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
