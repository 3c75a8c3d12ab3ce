//! Finding `libringsock.so`, and seeing whether it can be loaded.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// Its file name.
pub const NAME: &str = "libringsock.so";

/// Where the library is. The error says where it was looked for.
pub fn find(asked: Option<&Path>) -> Result<PathBuf, String> {
    let from_env = env::var_os("RINGSOCK_LIB").filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(path) = asked.map(Path::to_path_buf).or(from_env) {
        return match path.canonicalize() {
            Ok(p) if p.is_file() => usable(p),
            Ok(p) => Err(format!("{} is not a file; --lib and RINGSOCK_LIB name {NAME} itself", p.display())),
            Err(e) => Err(format!("the library {} (from --lib or RINGSOCK_LIB): {e}", path.display())),
        };
    }
    let places = places(env::current_exe().ok().as_deref());
    for p in &places {
        if let Ok(found) = p.canonicalize() {
            if found.is_file() {
                return usable(found);
            }
        }
    }
    let looked: Vec<String> = places.iter().map(|p| format!("  {}", p.display())).collect();
    Err(format!(
        "{NAME} was not found. Build it with `cargo build --release`, or name it with --lib or RINGSOCK_LIB. Looked for:\n{}",
        looked.join("\n")
    ))
}

fn places(exe: Option<&Path>) -> Vec<PathBuf> {
    let mut places = Vec::new();
    if let Some(dir) = exe.and_then(Path::parent) {
        places.push(dir.join(NAME));
        // The test binaries of cargo lie one folder below what they test.
        if dir.ends_with("deps") {
            places.push(dir.with_file_name(NAME));
        }
        if let Some(prefix) = dir.parent() {
            places.push(prefix.join("lib/ringsock").join(NAME));
            places.push(prefix.join("lib").join(NAME));
        }
    }
    let triple = format!("{}-linux-gnu", env::consts::ARCH);
    for dir in ["/usr/local/lib/ringsock", "/usr/lib/ringsock", "/usr/lib64/ringsock"] {
        places.push(Path::new(dir).join(NAME));
    }
    places.push(Path::new("/usr/lib").join(triple).join("ringsock").join(NAME));
    places.dedup();
    places
}

/// The loader splits `LD_PRELOAD` at spaces and colons and knows no quoting.
fn usable(path: PathBuf) -> Result<PathBuf, String> {
    if path.to_str().is_none_or(|t| t.contains([' ', ':'])) {
        return Err(format!(
            "{} cannot be preloaded: LD_PRELOAD cannot hold a path with a space or a colon; move or link the library elsewhere",
            path.display()
        ));
    }
    Ok(path)
}

/// `LD_PRELOAD` with the library in front of what is there already.
pub fn preload_list(library: &str, old: Option<&str>) -> String {
    let rest = old.unwrap_or("").split([' ', ':']).filter(|p| !p.is_empty() && *p != library);
    std::iter::once(library).chain(rest).collect::<Vec<_>>().join(":")
}

/// Whether the dynamic loader takes the library: tried in a child, for real.
pub fn try_preload(library: &Path) -> Result<(), String> {
    let exe = env::current_exe().map_err(|e| format!("cannot find this command's own file: {e}"))?;
    let out = Command::new(exe)
        .arg("__loaded")
        .env("LD_PRELOAD", library)
        .env("RINGSOCK_LINKS", "none")
        .env_remove("RINGSOCK_REPORT")
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("cannot start a child to try it: {e}"))?;
    if out.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&out.stderr).trim().to_string();
    Err(if said.is_empty() { format!("the child that loads it failed ({})", out.status) } else { said })
}

/// In that child: whether the library is mapped.
pub fn loaded_here() -> ExitCode {
    match std::fs::read_to_string("/proc/self/maps") {
        Ok(maps) if maps_library(&maps).is_some() => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

/// The path of the library in a process's `/proc/PID/maps`.
pub fn maps_library(maps: &str) -> Option<&str> {
    maps.lines().find_map(|l| {
        let path = &l[l.find('/')?..];
        path.trim_end_matches(" (deleted)").ends_with("/libringsock.so").then_some(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn preload_lists() {
        assert_eq!(preload_list("/l.so", None), "/l.so");
        assert_eq!(preload_list("/l.so", Some("")), "/l.so");
        assert_eq!(preload_list("/l.so", Some("/a.so /b.so:/l.so")), "/l.so:/a.so:/b.so");
    }

    #[test]
    fn awkward_paths_are_refused() {
        assert!(usable("/a b/libringsock.so".into()).is_err());
        assert!(usable("/a:b/libringsock.so".into()).is_err());
        assert!(usable("/a/libringsock.so".into()).is_ok());
    }

    #[test]
    fn a_missing_library_is_named() {
        let e = find(Some(Path::new("/nonexistent/l.so"))).unwrap_err();
        assert!(e.contains("/nonexistent/l.so") && e.contains("RINGSOCK_LIB"), "{e}");
    }

    #[test]
    fn the_library_in_maps() {
        let maps = "7f00-7f01 r-xp 00000000 08:01 42   /opt/x/libringsock.so\n7f02-7f03 rw-p 0 00:00 0\n";
        assert_eq!(maps_library(maps), Some("/opt/x/libringsock.so"));
        assert_eq!(maps_library("7f00-7f01 r-xp 0 08:01 42 /opt/libringsock.so.txt\n"), None);
    }
}
