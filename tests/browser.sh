#!/bin/sh
# Print the path of a Chromium for the tests of the report page: `sh tests/browser.sh`. With the word install, install it
# where there is none and where that takes no question: as root, with apt-get.
set -eu
find_browser() {
    for name in ${CHROMIUM:-chromium chromium-browser google-chrome google-chrome-stable}; do
        command -v "$name" 2>/dev/null && return 0
    done
    return 1
}
find_browser && exit 0
if [ -z "${CHROMIUM:-}" ] && [ "${1:-}" = install ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update && apt-get install --yes --no-install-recommends chromium; } >&2 && find_browser && exit 0
fi
echo "the tests of the report page need ${CHROMIUM:-Chromium}: install it (Debian and Ubuntu: apt-get install chromium), or set CHROMIUM to the path of one" >&2
exit 1
