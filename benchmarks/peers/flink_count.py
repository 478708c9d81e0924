"""Run inside PyFlink's environment: compiles FlinkCount.java against its jars and runs it; arguments as its own."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyflink

source = Path(__file__).with_name("FlinkCount.java")
jars = str(Path(pyflink.__file__).parent / "lib" / "*")
if shutil.which("javac") is None:
    sys.exit("there is no JDK (javac) here, only what runs Java programs")
built = Path(tempfile.gettempdir()) / f"holdfast-flink-{os.getuid()}-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}"
if not (built / "FlinkCount.class").exists():
    subprocess.run(["javac", "-nowarn", "-cp", jars, "-d", str(built), str(source)], check=True, stdout=sys.stderr)
folder = tempfile.mkdtemp()
opened = [f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in ("java.util", "java.lang", "java.net", "java.nio")]
done = subprocess.run(["java", "-Xmx2g", *opened, "-cp", f"{built}{os.pathsep}{jars}", "FlinkCount", *sys.argv[1:5], folder],
                      capture_output=True, text=True)
shutil.rmtree(folder, ignore_errors=True)
sys.stderr.write(done.stderr[-4000:])
print(next((line for line in done.stdout.splitlines() if line.startswith("{")), ""))
sys.exit(done.returncode)
