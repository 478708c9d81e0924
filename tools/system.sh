#!/bin/sh
# Installs a JRE and a browser where they are missing and this user may; says what to install where not.
set -u
need() { # command, Debian package, what for
    command -v "$1" >/dev/null 2>&1 && return 0
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "installing $2 ($3)"
        { [ -n "${updated:-}" ] || apt-get update -qq; } && updated=1
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$2" >/dev/null && return 0
    fi
    echo "please install $2: it is needed for $3" >&2
}
need java openjdk-17-jre-headless "Spark"
need chromium chromium "the tests of the web page"
exit 0
