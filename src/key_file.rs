//! Issuing API keys: making one, and adding its entry to `proxy.toml` without touching anything else there.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
};

use toml_edit::{ArrayOfTables, Document, Item, Table, TomlError, Value, value};

use crate::{
    atomic_file,
    keys::{ApiKey, KeyHash, KeyId, PREFIX},
};

/// The digits of the secret: all of them can be selected by a double click and need no escape anywhere.
const BASE62: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// 62^43 is a little more than 2^256.
const SECRET_DIGITS: usize = 43;

/// A key that was just made. Only here is the secret there to be shown, once.
pub struct NewKey {
    id: KeyId,
    secret: String,
}

/// Makes a key for `id` with 256 bits of randomness from the operating system.
pub fn make(id: &KeyId) -> NewKey {
    let mut secret = format!("{PREFIX}{id}-");
    let length = secret.len() + SECRET_DIGITS;
    while secret.len() < length {
        let mut bytes = [0; SECRET_DIGITS];
        getrandom::fill(&mut bytes).expect("an operating system that runs a server has random bytes");
        // 248 is four times 62: below it every digit is as likely as any other, and the rest is thrown away.
        let digits = bytes.iter().filter(|byte| **byte < 248).map(|byte| BASE62[usize::from(byte % 62)]);
        secret.extend(digits.take(length - secret.len()).map(char::from));
    }
    NewKey { id: id.clone(), secret }
}

impl NewKey {
    /// The public name.
    pub fn id(&self) -> &KeyId {
        &self.id
    }

    /// What the caller sends. It is stored nowhere: show it once.
    pub fn secret(&self) -> &str {
        &self.secret
    }

    /// What is stored.
    pub fn hash(&self) -> KeyHash {
        ApiKey::new(&self.secret).expect("a prefix, 64 bytes of id and 43 of secret are short enough").hash()
    }

    /// The entry for `proxy.toml`: four lines that begin with `[[keys]]`.
    pub fn toml_lines(&self, tier: &str) -> String {
        let mut entry = Table::new();
        entry["id"] = value(self.id.as_str());
        entry["hash"] = value(self.hash().to_string());
        entry["tier"] = value(tier);
        format!("[[keys]]\n{entry}")
    }
}

impl fmt::Debug for NewKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewKey").field("id", &self.id).finish_non_exhaustive()
    }
}

/// The entry is not in the file, which is as it was.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// The file can't be read.
    #[error("can't read {}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is no TOML.
    #[error("{} is not valid TOML: run `tollgate check` and mend it first", .path.display())]
    NotToml {
        /// The file.
        path: PathBuf,
        /// Where, with the line.
        source: TomlError,
    },
    /// The file has no such tier.
    #[error("there is no tier {tier:?} in {}: {}", .path.display(), if .known.is_empty() {
        "add a [tiers.NAME] table to it first".to_owned()
    } else {
        format!("its tiers are {}", .known.join(", "))
    })]
    UnknownTier {
        /// The file.
        path: PathBuf,
        /// The tier that was asked for.
        tier: String,
        /// Those that are there.
        known: Vec<String>,
    },
    /// The file has a key of that id.
    #[error("there is a key {id} in {} already: choose another id, or remove that one first", .path.display())]
    Taken {
        /// The file.
        path: PathBuf,
        /// The id.
        id: KeyId,
    },
    /// `keys` is there, but not as `[[keys]]`.
    #[error("`keys` in {} is not written as [[keys]] entries: write it so, or add the new key by hand", .path.display())]
    NotEntries {
        /// The file.
        path: PathBuf,
    },
    /// The file with the entry in it would not read back as expected.
    #[error("the new entry does not fit into {}: add it by hand", .path.display())]
    Unfit {
        /// The file.
        path: PathBuf,
        /// What is wrong, where it is no TOML any more.
        source: Option<TomlError>,
    },
    /// The file can't be written.
    #[error(
        "can't write {}: check that you may write it and its folder, and that it is no mount of its own, or add the \
         new key by hand", .path.display()
    )]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Adds the key to the configuration file, behind the last key there. The rest stays byte for byte.
///
/// The tier must be in the file and the id must not. The file is replaced whole, keeps its mode and its owner, and may
/// be reached by a symbolic link.
pub fn append(path: &Path, new: &NewKey, tier: &str) -> Result<(), AppendError> {
    let cant_read = |source| AppendError::Read { path: path.into(), source };
    let target = path.canonicalize().map_err(cant_read)?;
    // Of two that add a key at the same time, the second must read what the first wrote.
    let _lock = atomic_file::lock_folder(&target);
    let text = fs::read_to_string(&target).map_err(cant_read)?;
    let with_entry = insert(&text, path, new, tier)?;
    atomic_file::replace(&target, with_entry.as_bytes())
        .map_err(|source| AppendError::Write { path: path.into(), source })
}

/// The text with the entry in it. It is spliced, for writing the parsed document out would change line ends.
fn insert(text: &str, path: &Path, new: &NewKey, tier: &str) -> Result<String, AppendError> {
    let document =
        Document::parse(text).map_err(|source| AppendError::NotToml { path: path.into(), source })?;
    check_tier(&document, path, tier)?;
    let entries = entries(&document, path)?;
    if ids(entries).any(|id| id == new.id.as_str()) {
        return Err(AppendError::Taken { path: path.into(), id: new.id.clone() });
    }

    let last = entries.and_then(|entries| entries.iter().last());
    let at = last.and_then(end_of_table).map_or(text.len(), |end| end_of_line(text, end));
    let (before, after) = text.split_at(at);
    let gap = if before.is_empty() || before.ends_with("\n\n") || before.ends_with("\n\r\n") {
        ""
    } else if before.ends_with('\n') {
        "\n"
    } else {
        "\n\n"
    };
    let mut entry = format!("{gap}{}", new.toml_lines(tier));
    if text.contains("\r\n") {
        entry = entry.replace('\n', "\r\n");
    }
    let with_entry = format!("{before}{entry}{after}");
    check_entry(&with_entry, entries.map_or(0, ArrayOfTables::len), path, new)?;
    Ok(with_entry)
}

fn check_tier(document: &Document<&str>, path: &Path, tier: &str) -> Result<(), AppendError> {
    let tiers = document.get("tiers").and_then(Item::as_table_like);
    if tiers.is_some_and(|tiers| tiers.contains_key(tier)) {
        return Ok(());
    }
    let known =
        tiers.map(|tiers| tiers.iter().map(|(name, _)| name.to_owned()).collect()).unwrap_or_default();
    Err(AppendError::UnknownTier { path: path.into(), tier: tier.into(), known })
}

fn entries<'a>(document: &'a Document<&str>, path: &Path) -> Result<Option<&'a ArrayOfTables>, AppendError> {
    match document.get("keys") {
        None => Ok(None),
        Some(Item::ArrayOfTables(entries)) => Ok(Some(entries)),
        Some(_) => Err(AppendError::NotEntries { path: path.into() }),
    }
}

fn ids(entries: Option<&ArrayOfTables>) -> impl Iterator<Item = &str> {
    entries.into_iter().flatten().filter_map(|entry| entry.get("id")?.as_str())
}

/// Where the last thing in the table ends, in bytes from the file's start.
fn end_of_table(table: &Table) -> Option<usize> {
    let header = table.span().map(|span| span.end);
    table.iter().map(|(_, item)| end_of_item(item)).fold(header, Option::max)
}

fn end_of_item(item: &Item) -> Option<usize> {
    match item {
        Item::None => None,
        Item::Value(value) => Value::span(value).map(|span| span.end),
        Item::Table(table) => end_of_table(table),
        Item::ArrayOfTables(tables) => tables.iter().filter_map(end_of_table).max(),
    }
}

/// Behind the line end that follows `from`, so that a comment stays with its line.
fn end_of_line(text: &str, from: usize) -> usize {
    text[from..].find('\n').map_or(text.len(), |newline| from + newline + 1)
}

/// The file is somebody's work: it is not replaced before the new text has been read back.
fn check_entry(text: &str, had: usize, path: &Path, new: &NewKey) -> Result<(), AppendError> {
    let unfit = |source| AppendError::Unfit { path: path.into(), source };
    let document = Document::parse(text).map_err(|source| unfit(Some(source)))?;
    let entries = entries(&document, path)?;
    let added = entries.is_some_and(|entries| entries.len() == had + 1)
        && ids(entries).last() == Some(new.id.as_str());
    if added { Ok(()) } else { Err(unfit(None)) }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::HashSet,
        os::unix::fs::{PermissionsExt, symlink},
    };

    use tempfile::TempDir;

    use super::*;

    const FILE: &str = r#"# The house rules.
[server]
listen = "[::]:8443"   # both families

[tiers.free]
limits = [{ requests = 10, per = "1m" }]
[tiers."very paid"]
limits = []

# alice pays by invoice
[[keys]]
id = "alice"
hash = "sha256:00"
tier = "free"
limits = [
    { requests = 5, per = "1m" }, # for now
] # until May

# The real thing.
[[upstreams]]
url = "https://api.example"

# The end.
"#;

    fn key(id: &str) -> NewKey {
        make(&id.parse().unwrap())
    }

    fn inserted(text: &str, id: &str) -> Result<(String, String), AppendError> {
        let new = key(id);
        Ok((insert(text, Path::new("proxy.toml"), &new, "free")?, new.toml_lines("free")))
    }

    #[test]
    fn a_key_has_its_form_and_is_never_the_same() {
        let keys: Vec<_> = (0..200).map(|_| key("team-7.x")).collect();
        for key in &keys {
            let secret = key.secret().strip_prefix("sk-tg-team-7.x-").unwrap();
            assert_eq!(secret.len(), 43);
            assert!(secret.bytes().all(|byte| byte.is_ascii_alphanumeric()));
            assert_eq!(key.hash(), ApiKey::new(key.secret()).unwrap().hash());
        }
        assert_eq!(keys.iter().map(NewKey::secret).collect::<HashSet<_>>().len(), 200);
    }

    #[test]
    fn every_digit_is_as_likely_as_any_other() {
        let mut counts = [0_u32; 128];
        for _ in 0..2000 {
            key("a").secret()["sk-tg-a-".len()..].bytes().for_each(|byte| counts[usize::from(byte)] += 1);
        }
        // 86 000 draws: about 1387 for each digit, and 37 is the standard deviation.
        for digit in BASE62 {
            let count = counts[usize::from(*digit)];
            assert!((1150..1650).contains(&count), "{}: {count}", char::from(*digit));
        }
    }

    #[test]
    fn debug_output_holds_no_secret() {
        let key = key("alice");
        let shown = format!("{key:?}");
        assert!(shown.contains("alice") && !shown.contains(&key.secret()["sk-tg-alice-".len()..]), "{shown}");
    }

    #[test]
    fn the_lines_are_an_entry() {
        let key = key("bob");
        let lines = key.toml_lines("very \"paid\"");
        let document = Document::parse(lines.as_str()).unwrap();
        let entry = document["keys"].as_array_of_tables().unwrap().get(0).unwrap();
        assert_eq!(entry["id"].as_str(), Some("bob"));
        assert_eq!(entry["hash"].as_str().unwrap().parse::<KeyHash>().unwrap(), key.hash());
        assert_eq!(entry["tier"].as_str(), Some("very \"paid\""));
        assert!(key.toml_lines("free").starts_with("[[keys]]\nid = \"bob\"\nhash = \"sha256:"));
        assert!(key.toml_lines("free").ends_with("\ntier = \"free\"\n"));
        assert!(!lines.contains(key.secret()));
    }

    #[test]
    fn an_entry_goes_behind_the_last_key_and_the_rest_stays() {
        let (text, lines) = inserted(FILE, "bob").unwrap();
        let (before, after) = FILE.split_at(FILE.find("\n# The real thing").unwrap());
        assert_eq!(text, format!("{before}\n{lines}{after}"));
        assert_eq!(text.replacen(&format!("\n{lines}"), "", 1), FILE);
        let (twice, more) = inserted(&text, "carol").unwrap();
        assert_eq!(twice.replacen(&format!("\n{more}"), "", 1), text);
    }

    #[test]
    fn a_file_without_keys_gets_its_first_at_the_end() {
        for (text, gap) in [
            ("tiers = { free = {} }", "\n\n"),
            ("[tiers.free]\nlimits = []\n", "\n"),
            ("[tiers.free]\nlimits = []\n\n", ""),
            ("tiers.free.limits = []\n# the end", "\n\n"),
        ] {
            let (with_entry, lines) = inserted(text, "bob").unwrap();
            assert_eq!(with_entry, format!("{text}{gap}{lines}"));
        }
    }

    #[test]
    fn tables_inside_a_key_stay_with_it() {
        let text = "[tiers.free]\n[[keys]]\nid = \"a\"\n[[keys.limits]]\nrequests = 1\n[server]\nx = \"\"\"\na\nb\"\"\"\n";
        let (with_entry, lines) = inserted(text, "bob").unwrap();
        assert_eq!(with_entry, text.replace("[server]", &format!("\n{lines}[server]")));
    }

    #[test]
    fn line_ends_of_windows_stay() {
        let text = FILE.replace('\n', "\r\n");
        let (with_entry, lines) = inserted(&text, "bob").unwrap();
        assert_eq!(with_entry.replacen(&format!("\r\n{}", lines.replace('\n', "\r\n")), "", 1), text);
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_reason() {
        let refusal = |text: &str, id: &str| inserted(text, id).expect_err("must be refused").to_string();
        assert!(refusal(FILE, "alice").contains("a key alice in proxy.toml already"));
        assert!(refusal("[[keys]]\n", "bob").contains("add a [tiers.NAME] table"));
        assert!(refusal("[tiers.free]\n[keys]\n", "bob").contains("not written as [[keys]] entries"));
        assert!(refusal("keys = []\n[tiers.free]\n", "bob").contains("not written as [[keys]] entries"));
        assert!(refusal("[tiers.free", "bob").contains("is not valid TOML"));
        let error =
            insert(FILE, Path::new("proxy.toml"), &key("bob"), "fre").expect_err("there is no such tier");
        assert!(error.to_string().ends_with("its tiers are free, very paid"), "{error}");
    }

    #[test]
    fn a_file_keeps_its_mode_and_its_link() {
        let folder = TempDir::new().unwrap();
        let (path, link) = (folder.path().join("real.toml"), folder.path().join("proxy.toml"));
        fs::write(&path, FILE).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        symlink("real.toml", &link).unwrap();
        append(&link, &key("bob"), "very paid").unwrap();
        assert!(link.is_symlink());
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o640);
        assert!(fs::read_to_string(&path).unwrap().contains("id = \"bob\""));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_file_that_cant_be_changed_is_left_alone() {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("proxy.toml");
        assert!(matches!(append(&path, &key("bob"), "free"), Err(AppendError::Read { .. })));
        fs::write(&path, FILE).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o444)).unwrap();
        let error = append(&path, &key("bob"), "free").expect_err("the file is read-only");
        assert!(matches!(&error, AppendError::Write { .. }), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), FILE);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn keys_that_are_added_at_the_same_time_are_all_there() {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("proxy.toml");
        fs::write(&path, FILE).unwrap();
        std::thread::scope(|scope| {
            for id in ["a", "b", "c", "d", "e", "f"] {
                let path = &path;
                scope.spawn(move || append(path, &key(id), "free").unwrap());
            }
        });
        let text = fs::read_to_string(&path).unwrap();
        let document = Document::parse(text.as_str()).unwrap();
        assert_eq!(document["keys"].as_array_of_tables().unwrap().len(), 7);
    }
}
