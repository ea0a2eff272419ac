"""Runs a command that would otherwise live on: it ends when this script's stdin does.

First line of stdin: {"command": [...], "probe": URL}. Prints {"ready": true} when the URL answers
with 200, and {"error": ...} if the command ends before that. For programs that cannot end by
themselves with whoever started them.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

TICK_S = 0.1
GRACE_S = 3.0


def answers(url):
    """Whether the URL is served."""
    try:
        with urllib.request.urlopen(url, timeout=2.0) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def end(process):
    """End the command and all it started."""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def main():
    """Start, wait until it is served, and stay until stdin ends."""
    hello = json.loads(sys.stdin.readline())
    process = subprocess.Popen(
        hello["command"], stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True
    )
    gone = threading.Event()

    def watch():
        sys.stdin.read()
        gone.set()

    threading.Thread(target=watch, daemon=True).start()
    try:
        while not gone.is_set() and process.poll() is None and not answers(hello["probe"]):
            time.sleep(TICK_S)
        if process.poll() is not None:
            print(json.dumps({"error": f"it ended with code {process.returncode}"}), flush=True)
            return
        print(json.dumps({"ready": True}), flush=True)
        while not gone.wait(TICK_S) and process.poll() is None:
            pass
    finally:
        end(process)


main()
