"Lay a virtual environment over this one (`python overlay.py DIRECTORY`): its own packages come before the ones here."

import sys
import sysconfig
from pathlib import Path

below = sysconfig.get_path("purelib")
above = sysconfig.get_path("purelib", vars={"base": sys.argv[1]})
Path(above, "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
