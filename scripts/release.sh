#!/usr/bin/env bash
# Tag a release and build its wheel and source distribution into dist/.
#
#   scripts/release.sh VERSION              # on main, with a clean tree; tags vVERSION
#   scripts/release.sh --dry-run VERSION    # builds the same, from any branch; no tag
#
# VERSION must be that of nemo_specrl/__init__.py and CITATION.cff, and to be tagged it must have a
# section in CHANGELOG.md ("## VERSION"). Nothing is pushed or uploaded.
# UV names another uv than the one of .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
    echo "release: $*" >&2
    exit 1
}

dry_run=false
version=
for argument in "$@"; do
    case "$argument" in
        --dry-run) dry_run=true ;;
        -*) die "unknown option $argument; known is --dry-run" ;;
        *) [[ -z $version ]] || die "more than one version: $version and $argument"; version=$argument ;;
    esac
done
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+((a|b|rc)[0-9]+)?$ ]] ||
    die "give a version such as 0.1.0 or 0.2.0rc1, got '$version'"
tag=v$version

uv=${UV:-.venv/bin/uv}
[[ -x $uv ]] || die "there is no $uv; run 'make setup' first"
[[ -z $(git status --porcelain) ]] || die "the tree has changes; commit or remove them"
grep -q "^__version__ = \"$version\"$" nemo_specrl/__init__.py ||
    die "nemo_specrl/__init__.py has another __version__ than $version"
grep -q "^version: $version$" CITATION.cff || die "CITATION.cff has another version than $version"
if ! $dry_run; then
    branch=$(git branch --show-current)
    [[ $branch == main ]] || die "releases are made from main, this is '${branch:-a detached commit}'"
    grep -qE "^## \[?${version//./\\.}\]?( |$)" CHANGELOG.md ||
        die "CHANGELOG.md has no section '## $version'; rename 'Unreleased'"
    git rev-parse -q --verify "refs/tags/$tag" >/dev/null && die "the tag $tag exists already"
fi

rm -rf dist
"$uv" build --quiet --out-dir dist
rm -rf nemo_specrl.egg-info # which would say of any copy that starts here that pip has installed it
if $dry_run; then
    echo "release: built without a tag:"
else
    git tag --annotate "$tag" --message "nemo_specrl $version"
    echo "release: tagged $tag; 'git push origin $tag' publishes it. Built:"
fi
ls dist/*.whl dist/*.tar.gz
