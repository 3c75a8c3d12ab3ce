//! Whether a program can be preloaded, from its file.

use object::elf;
use object::read::elf::{FileHeader, ProgramHeader};
use object::Endianness;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What stands against preloading a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obstacle {
    /// No dynamic loader runs.
    Static,
    /// The loader ignores `LD_PRELOAD` where privileges are gained.
    Privileged(&'static str),
    /// Not of our word size or processor.
    OtherMachine(&'static str),
    /// Linked with musl.
    Musl,
    /// Not a program.
    NotAProgram(String),
}

impl Obstacle {
    /// The reason, to follow the program's name.
    pub fn text(&self) -> String {
        match self {
            Obstacle::Static => "is statically linked".into(),
            Obstacle::Privileged(how) => format!("gains privileges ({how}), so the loader ignores LD_PRELOAD"),
            Obstacle::OtherMachine(what) => format!("is {what} and cannot load this library"),
            Obstacle::Musl => "is linked with musl, and the library is for glibc".into(),
            Obstacle::NotAProgram(why) => why.clone(),
        }
    }

    /// Whether `LD_PRELOAD` would make the program itself fail or complain.
    pub fn must_not_try(&self) -> bool {
        matches!(self, Obstacle::Musl | Obstacle::OtherMachine(_))
    }
}

/// The file that a shell would run for `name`.
pub fn resolve(name: &OsStr) -> Option<PathBuf> {
    let path = Path::new(name);
    if path.components().count() > 1 || path.is_absolute() || name.as_encoded_bytes().contains(&b'/') {
        return path.is_file().then(|| path.to_path_buf());
    }
    let dirs = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    std::env::split_paths(&dirs).map(|d| d.join(path)).find(|p| is_executable(p))
}

fn is_executable(p: &Path) -> bool {
    fs::metadata(p).is_ok_and(|m| m.is_file() && m.mode() & 0o111 != 0)
}

/// What stands against preloading the program at `path`; follows `#!` lines.
pub fn inspect(path: &Path) -> Option<Obstacle> {
    inspect_at(path, 4)
}

fn inspect_at(path: &Path, depth: u32) -> Option<Obstacle> {
    // Headers are at the front; a program may be larger than memory.
    let mut data = Vec::new();
    let file = match File::open(path) {
        Ok(file) => file,
        // One may run what one may not read; there is nothing to say then.
        Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => return privileges(path),
        Err(e) => return Some(Obstacle::NotAProgram(format!("cannot be read ({e})"))),
    };
    if let Err(e) = file.take(1 << 20).read_to_end(&mut data) {
        return Some(Obstacle::NotAProgram(format!("cannot be read ({e})")));
    }
    if let Some(line) = data.strip_prefix(b"#!") {
        let line = line.split(|&b| b == b'\n').next().unwrap_or(&[]);
        let line = String::from_utf8_lossy(line);
        let mut words = line.split_whitespace();
        let interpreter = words.next()?;
        if depth == 0 {
            return None;
        }
        let target = match words.find(|w| !w.starts_with('-') && !w.contains('=')) {
            Some(name) if interpreter.ends_with("/env") => resolve(OsStr::new(name))?,
            _ => PathBuf::from(interpreter),
        };
        return inspect_at(&target, depth - 1);
    }
    elf_obstacle(&data).or_else(|| privileges(path))
}

fn elf_obstacle(data: &[u8]) -> Option<Obstacle> {
    if !data.starts_with(&elf::ELFMAG) {
        return Some(Obstacle::NotAProgram("is neither an ELF program nor a script".into()));
    }
    if data.get(4) == Some(&elf::ELFCLASS32) {
        return Some(Obstacle::OtherMachine("32-bit"));
    }
    let bad = || Some(Obstacle::NotAProgram("has a damaged ELF header".into()));
    let Ok(header) = elf::FileHeader64::<Endianness>::parse(data) else { return bad() };
    let Ok(endian) = header.endian() else { return bad() };
    let ours = if cfg!(target_arch = "aarch64") { elf::EM_AARCH64 } else { elf::EM_X86_64 };
    if header.e_machine(endian) != ours {
        return Some(Obstacle::OtherMachine("for another processor"));
    }
    let Ok(segments) = header.program_headers(endian, data) else { return bad() };
    let interpreter = segments.iter().find_map(|s| s.interpreter(endian, data).ok().flatten());
    match interpreter {
        None => Some(Obstacle::Static),
        Some(i) if i.windows(7).any(|w| w == b"ld-musl") => Some(Obstacle::Musl),
        Some(_) => None,
    }
}

fn privileges(path: &Path) -> Option<Obstacle> {
    let meta = fs::metadata(path).ok()?;
    // SAFETY: these only read ids.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    if meta.mode() & libc::S_ISUID != 0 && meta.uid() != uid {
        return Some(Obstacle::Privileged("setuid"));
    }
    if meta.mode() & libc::S_ISGID != 0 && meta.mode() & 0o010 != 0 && meta.gid() != gid {
        return Some(Obstacle::Privileged("setgid"));
    }
    let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).ok()?;
    // SAFETY: two C strings; no value is asked for, only its size.
    let size = unsafe { libc::getxattr(name.as_ptr(), c"security.capability".as_ptr(), std::ptr::null_mut(), 0) };
    (size > 0 && uid != 0).then_some(Obstacle::Privileged("file capabilities"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_this_host() {
        assert_eq!(inspect(&resolve(OsStr::new("sh")).unwrap()), None);
        assert_eq!(inspect(&std::env::current_exe().unwrap()), None);
        assert_eq!(resolve(OsStr::new("no-such-program-here")), None);
        assert!(matches!(inspect(Path::new("/etc/passwd")), Some(Obstacle::NotAProgram(_))));
        assert!(matches!(inspect(Path::new("/nonexistent")), Some(Obstacle::NotAProgram(_))));
    }

    #[test]
    fn scripts_are_what_their_interpreter_is() {
        let path = std::env::temp_dir().join(format!("ringsock-script-{}", std::process::id()));
        fs::write(&path, "#!/usr/bin/env sh\n").unwrap();
        let by_env = inspect(&path);
        fs::write(&path, "#!/nonexistent/sh -e\n").unwrap();
        let missing = inspect(&path);
        fs::remove_file(&path).unwrap();
        assert_eq!(by_env, None);
        assert!(matches!(missing, Some(Obstacle::NotAProgram(_))));
    }

    /// A 64-bit header with one program header, PT_INTERP if there is an interpreter.
    fn elf(class: u8, machine: u16, interp: Option<&str>) -> Vec<u8> {
        let mut d = vec![0u8; 64 + 56];
        d[..8].copy_from_slice(&[0x7f, b'E', b'L', b'F', class, 1, 1, 0]);
        d[16..18].copy_from_slice(&2u16.to_le_bytes());
        d[18..20].copy_from_slice(&machine.to_le_bytes());
        d[20..24].copy_from_slice(&1u32.to_le_bytes());
        d[32..40].copy_from_slice(&64u64.to_le_bytes());
        d[52..54].copy_from_slice(&64u16.to_le_bytes());
        d[54..56].copy_from_slice(&56u16.to_le_bytes());
        d[56..58].copy_from_slice(&1u16.to_le_bytes());
        let text = interp.map(|i| format!("{i}\0")).unwrap_or_default();
        d[64..68].copy_from_slice(&(if interp.is_some() { elf::PT_INTERP } else { elf::PT_LOAD }).to_le_bytes());
        d[72..80].copy_from_slice(&120u64.to_le_bytes());
        d[96..104].copy_from_slice(&(text.len() as u64).to_le_bytes());
        d.extend(text.bytes());
        d
    }

    #[test]
    fn kinds_of_elf() {
        let ours = if cfg!(target_arch = "aarch64") { elf::EM_AARCH64 } else { elf::EM_X86_64 };
        assert_eq!(elf_obstacle(&elf(2, ours, Some("/lib64/ld-linux-x86-64.so.2"))), None);
        assert_eq!(elf_obstacle(&elf(2, ours, Some("/lib/ld-musl-x86_64.so.1"))), Some(Obstacle::Musl));
        assert_eq!(elf_obstacle(&elf(2, ours, None)), Some(Obstacle::Static));
        assert!(matches!(elf_obstacle(&elf(2, elf::EM_S390, None)), Some(Obstacle::OtherMachine(_))));
        assert_eq!(elf_obstacle(&elf(1, ours, None)), Some(Obstacle::OtherMachine("32-bit")));
        let whole = elf(2, ours, Some("/lib64/ld-linux-x86-64.so.2"));
        for n in 0..whole.len() {
            // A cut file is never a panic.
            let _ = elf_obstacle(&whole[..n]);
        }
    }
}
