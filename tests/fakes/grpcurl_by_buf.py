"""grpcurl's command line for one call, made with `buf curl`: for machines that have no grpcurl.

grpcurl_by_buf.py -plaintext -d BODY TARGET METHOD
"""

from __future__ import annotations

import argparse
import os
import sys


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-plaintext", action="store_true", required=True)
    parser.add_argument("-d", dest="body", required=True)
    parser.add_argument("target")
    parser.add_argument("method")
    given = parser.parse_args()
    flags = ("--http2-prior-knowledge", "--protocol", "grpc", "--reflect")
    buf = os.environ["BUF"]
    os.execv(buf, [buf, "curl", *flags, "-d", given.body, f"http://{given.target}/{given.method}"])


if __name__ == "__main__":
    sys.exit(main())
