"""``over.py FOLDER``: let a virtual environment import what this one has installed too."""

import subprocess
import sys
import sysconfig
from pathlib import Path

WHERE = "import sysconfig; print(sysconfig.get_path('purelib'))"

if __name__ == "__main__":
    interpreter = Path(sys.argv[1], "bin", "python")
    done = subprocess.run([interpreter, "-c", WHERE], capture_output=True, text=True, check=True)
    own = sysconfig.get_path("purelib")
    line = f"import site; site.addsitedir({own!r})\n"
    Path(done.stdout.strip(), "over.pth").write_text(line, encoding="utf-8")
