# shellcheck shell=bash
# Sourced by the scripts beside it: where to find cargo, where it builds.
if [ -n "${HOME:-}" ] && [ -d "$HOME/.cargo/bin" ]; then
    case ":$PATH:" in
        *":$HOME/.cargo/bin:"*) ;;
        *) PATH="$PATH:$HOME/.cargo/bin" ;;
    esac
    export PATH
fi
