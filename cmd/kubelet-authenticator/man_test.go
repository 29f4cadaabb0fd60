// SPDX-License-Identifier: Apache-2.0

package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/command"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/doctor"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
)

// The man pages: mdoc(7), one macro in a line.
const (
	programPage = "../../docs/man/kubelet-authenticator.8"
	configPage  = "../../docs/man/kubelet-authenticator-config.5"
)

// cut returns the text between a line and the next one that begins with one of the ends.
func cut(t *testing.T, page, line string, ends ...string) string {
	t.Helper()
	_, text, ok := strings.Cut(page, "\n"+line+"\n")
	if !ok {
		t.Fatalf("there is no line %q", line)
	}
	for _, end := range ends {
		text, _, _ = strings.Cut("\n"+text, "\n"+end)
	}
	return text
}

func section(t *testing.T, page, name string) string { return cut(t, page, ".Sh "+name, ".Sh ") }

// item is one entry of a list.
type item struct{ head, body string }

func items(text string) []item {
	var found []item
	for _, rest := range strings.Split(text, "\n.It ")[1:] {
		rest, _, _ = strings.Cut(rest, "\n.El")
		head, body, _ := strings.Cut(rest, "\n")
		found = append(found, item{head, body})
	}
	return found
}

// named returns what the macro marks, in the order of the text.
func named(macro, text string) []string {
	var found []string
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		if len(words) > 0 && strings.HasPrefix(words[0], ".") {
			words[0] = words[0][1:]
			for i, word := range words[:len(words)-1] {
				if word == macro {
					found = append(found, words[i+1])
				}
			}
		}
	}
	return found
}

// flagsIn returns the flags that are marked as this program's. Those of other programs are marked
// as literal text.
func flagsIn(text string) map[string]bool {
	found := map[string]bool{}
	for _, name := range named("Fl", text) {
		found["-"+name] = true
	}
	return found
}

// flagsOf returns the flags of a set that a reader may see, and their short forms.
func flagsOf(set *pflag.FlagSet) map[string]bool {
	found := map[string]bool{}
	set.VisitAll(func(f *pflag.Flag) {
		if f.Hidden {
			return
		}
		found["--"+f.Name] = true
		if f.Shorthand != "" {
			found["-"+f.Shorthand] = true
		}
	})
	return found
}

// ownFlags returns those of a command that it does not have in common with all others, and those of
// the commands below it.
func ownFlags(c *cobra.Command) map[string]bool {
	found := flagsOf(c.LocalNonPersistentFlags())
	for _, below := range c.Commands() {
		if c.HasParent() {
			maps.Copy(found, ownFlags(below))
		}
	}
	return found
}

func sameFlags(t *testing.T, where string, documented, actual map[string]bool) {
	t.Helper()
	if got, want := slices.Sorted(maps.Keys(documented)), slices.Sorted(maps.Keys(actual)); !slices.Equal(got, want) {
		t.Errorf("%s: documented are %q, and there are %q", where, got, want)
	}
}

// tree returns the commands of this binary, with those that cobra adds.
func tree() *cobra.Command {
	root := command.Program{Name: "kubelet-authenticator", Providers: providers(), DefaultProvider: tpm.Name}.Command()
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	return root
}

// Each command has its part, with its flags and their defaults, and nothing else has one.
func TestManPageHasEachCommand(t *testing.T) {
	page, root := readFile(t, programPage), tree()
	commands := section(t, page, "COMMANDS")
	parts := map[string]*cobra.Command{"Without a command": root}
	for _, c := range root.Commands() {
		parts[c.Name()] = c
	}
	for name, c := range parts {
		part := cut(t, commands, ".Ss "+name, ".Ss ")
		checkFlags(t, name, items(part), ownFlags(c), c)
		for _, below := range c.Commands() {
			if c != root && !slices.Contains(strings.Fields(part), below.Name()) {
				t.Errorf("%s does not name %s", name, below.Name())
			}
		}
	}
	if got := strings.Count(commands, "\n.Ss "); got != len(parts) {
		t.Errorf("%d parts for %d commands", got, len(parts))
	}
	common := flagsOf(root.PersistentFlags())
	common["--help"], common["-h"] = true, true
	checkFlags(t, "OPTIONS", items(section(t, page, "OPTIONS")), common, root)
}

func saysDefault(body, value string) bool {
	_, said, _ := strings.Cut(body, "The default")
	return strings.Contains(said, value)
}

// checkFlags compares a list's flags with those that there are, and looks for their defaults.
func checkFlags(t *testing.T, where string, list []item, actual map[string]bool, c *cobra.Command) {
	t.Helper()
	documented := map[string]bool{}
	for _, i := range list {
		for flag := range flagsIn(".It " + i.head) {
			documented[flag] = true
			f := c.Flags().Lookup(strings.TrimPrefix(flag, "--"))
			if f == nil {
				f = c.PersistentFlags().Lookup(strings.TrimPrefix(flag, "--"))
			}
			if f != nil && f.DefValue != "false" && !saysDefault(i.body, f.DefValue) {
				t.Errorf("%s: %s does not say that the default is %s", where, flag, f.DefValue)
			}
		}
	}
	sameFlags(t, where, documented, actual)
}

// The synopsis has each command that is not hidden, with all of its flags.
func TestManPageSynopsis(t *testing.T) {
	root := tree()
	want := map[string]map[string]bool{"": ownFlags(root)}
	for _, c := range root.Commands() {
		if c.Name() != "worker" {
			want[c.Name()] = ownFlags(c)
		}
	}
	got := map[string]map[string]bool{}
	for _, form := range strings.Split(section(t, readFile(t, programPage), "SYNOPSIS"), "\n.Nm\n")[1:] {
		name := ""
		if strings.HasPrefix(form, ".Cm ") {
			name = strings.Fields(form)[1]
		}
		if got[name] == nil {
			got[name] = map[string]bool{}
		}
		maps.Copy(got[name], flagsIn(form))
	}
	for name, flags := range want {
		// the long form will do
		maps.DeleteFunc(flags, func(flag string, _ bool) bool { return !strings.HasPrefix(flag, "--") })
		if got[name] == nil {
			t.Errorf("there is no %q", name)
		}
		sameFlags(t, name, got[name], flags)
	}
	if len(got) != len(want) {
		t.Errorf("%d forms for %d commands", len(got), len(want))
	}
}

// No flag is named that does not exist, and what is shown as typed is a command line of this
// program.
func TestManPagesNameFlagsThatExist(t *testing.T) {
	root := tree()
	exist := flagsOf(root.PersistentFlags())
	exist["--help"], exist["-h"] = true, true
	maps.Copy(exist, ownFlags(root))
	for _, c := range root.Commands() {
		maps.Copy(exist, ownFlags(c))
	}
	typed := 0
	for _, path := range []string{programPage, configPage} {
		page := readFile(t, path)
		for flag := range flagsIn(page) {
			if !exist[flag] {
				t.Errorf("%s: there is no flag %s", path, flag)
			}
		}
		lines := strings.ReplaceAll(section(t, page, "EXAMPLES"), "\\e\n", " ")
		for _, m := range regexp.MustCompile(`(?m)^(?:\.Dl )?# kubelet-authenticator\b([^|>\n]*)`).FindAllStringSubmatch(lines, -1) {
			typed++
			c, args, err := tree().Find(strings.Fields(m[1]))
			if err == nil {
				err = c.ParseFlags(args)
			}
			if err != nil || len(c.Flags().Args()) > 0 {
				t.Errorf("%s: %s: %v, %q", path, m[0], err, c.Flags().Args())
			}
		}
	}
	if typed < 6 {
		t.Errorf("only %d examples", typed)
	}
}

func TestManPageHasEachExitCode(t *testing.T) {
	want := []string{"0", "2"}
	status := items(section(t, readFile(t, programPage), "EXIT STATUS"))
	bodies, got := map[string]string{}, []string{}
	for _, i := range status {
		bodies[i.head] = i.body
		got = append(got, i.head)
	}
	for _, reason := range reason.All() {
		code := strconv.Itoa(reason.Code)
		want = append(want, code)
		if !strings.HasPrefix(bodies[code], ".Sy "+string(reason.Reason)+" .\n") {
			t.Errorf("%s is not said to be %s: %q", code, reason.Reason, bodies[code])
		}
	}
	if slices.Sort(want); !slices.Equal(slices.Sorted(slices.Values(got)), want) {
		t.Errorf("there are %q, want %q", got, want)
	}
}

func TestManPageHasEachCheckOfDoctor(t *testing.T) {
	var got, want []string
	for _, i := range items(cut(t, readFile(t, programPage), ".Ss doctor", ".Ss ")) {
		if strings.HasPrefix(i.head, "Sy ") {
			got = append(got, strings.Fields(i.head)[1])
		}
	}
	for _, check := range doctor.Checks() {
		want = append(want, check.Name)
	}
	if !slices.Equal(got, want) {
		t.Errorf("there are %q, want %q", got, want)
	}
}

// Each field is there with its type, its flag and the default that the flag has in this binary.
func TestManPageHasEachField(t *testing.T) {
	page, root := readFile(t, configPage), tree()
	list := items(section(t, page, "CONFIGURATION FIELDS"))
	types := map[reflect.Kind]string{reflect.String: "string path", reflect.Bool: "boolean", reflect.Struct: "duration"}
	fields := reflect.TypeFor[authenticator.Config]()
	n := 0
	for i := range fields.NumField() {
		name, _, _ := strings.Cut(fields.Field(i).Tag.Get("json"), ",")
		if name == "" {
			continue // kind and version
		}
		if n++; n > len(list) {
			t.Fatalf("%s is missing, or another before it", name)
		}
		is := list[n-1]
		head, kind, _ := strings.Cut(is.head, " : Ar ")
		if head != "Cm "+name || !slices.Contains(strings.Fields(types[fields.Field(i).Type.Kind()]), kind) {
			t.Errorf("%q stands where %s of type %s should", is.head, name, types[fields.Field(i).Type.Kind()])
		}
		words := regexp.MustCompile("([a-z])([A-Z])|([A-Z])([A-Z][a-z])").ReplaceAllString(name, "$1$3-$2$4")
		flag := root.PersistentFlags().Lookup(strings.ToLower(words))
		if flag == nil || !strings.HasSuffix(strings.TrimSpace(is.body), "\nThe flag is\n.Fl -"+flag.Name+" .") {
			t.Errorf("%s does not name its flag", name)
		} else if !saysDefault(is.body, flag.DefValue) {
			t.Errorf("%s does not say that the default is %s", name, flag.DefValue)
		}
	}
	if n != len(list) {
		t.Errorf("%d entries for %d fields", len(list), n)
	}
	for _, factory := range providers() {
		p, err := factory.New(provider.Settings{})
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(list[0].body, "\n.Cm "+p.Name()) || !strings.Contains(page, ".Ql "+p.SignerName()+"\n") {
			t.Errorf("provider %s, or its signer %s, is missing", p.Name(), p.SignerName())
		}
	}
	examples := strings.Split(section(t, page, "EXAMPLES"), "\n.Bd -literal -offset indent\n")[1:]
	if len(examples) != 2 {
		t.Errorf("%d examples", len(examples))
	}
	for _, example := range examples {
		example, _, _ = strings.Cut(example, ".Ed\n")
		config := authenticator.DefaultConfig()
		if err := authenticator.ParseConfig([]byte(example), &config); err != nil {
			t.Errorf("%v: %s", err, example)
		} else if _, err := authenticator.New(authenticator.Options{Config: config, Providers: providers()}); err != nil {
			t.Errorf("%v: %s", err, example)
		}
	}
}

// source is what the plugin's own packages have of files and of the environment.
type source struct {
	constants map[string]string // the strings among them, by package and name
	variables []ast.Expr        // that are read from the environment
}

// readSource parses the packages that are linked into the plugin: TestArrowsRunOneWay sees to it
// that arrows has them all.
func readSource(t *testing.T) source {
	found, done := source{constants: map[string]string{}}, map[string]bool{}
	for todo := []string{"cmd/kubelet-authenticator"}; len(todo) > 0; todo = todo[1:] {
		if pkg := todo[0]; !done[pkg] {
			done[pkg] = true
			todo = append(todo, arrows[pkg]...)
			files, err := filepath.Glob("../../" + pkg + "/*.go")
			if err != nil || len(files) == 0 {
				t.Fatalf("%s: %v", pkg, err)
			}
			for _, path := range files {
				if !strings.HasSuffix(path, "_test.go") {
					found.read(t, path)
				}
			}
		}
	}
	return found
}

func (s *source) read(t *testing.T, path string) {
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ValueSpec:
			for i, value := range n.Values {
				if literal, ok := value.(*ast.BasicLit); ok && literal.Kind == token.STRING {
					s.constants[file.Name.Name+"."+n.Names[i].Name], _ = strconv.Unquote(literal.Value)
				}
			}
		case *ast.CallExpr:
			if f, ok := n.Fun.(*ast.SelectorExpr); ok && (f.Sel.Name == "Getenv" || f.Sel.Name == "LookupEnv") {
				s.variables = append(s.variables, n.Args[0])
			}
		}
		return true
	})
}

// The man page has each file that the code names and each variable that it reads. It says which
// files of the certificate directory are secret.
func TestManPageHasEachFileAndVariable(t *testing.T) {
	page, code := readFile(t, programPage), readSource(t)
	files, environment := section(t, page, "FILES"), named("Ev", section(t, page, "ENVIRONMENT"))
	paths := 0
	for name, value := range code.constants {
		isFile := strings.HasSuffix(name, "File") || strings.HasSuffix(name, "Dir") || strings.HasPrefix(name, "cache.") && strings.HasPrefix(value, "kubelet-authenticator")
		if !isFile && !regexp.MustCompile(`^/(dev|etc|run|sys|usr|var)/`).MatchString(value) {
			continue
		}
		paths++
		if !strings.Contains(files, value) {
			t.Errorf("%s, %s, is not in FILES", name, value)
		}
	}
	if paths < 15 {
		t.Errorf("only %d files", paths)
	}
	for _, name := range []string{cache.CurrentFile, cache.PendingFile, cache.BootstrapFile, cache.StateFile, cache.LockFile, cache.LogFile} {
		if !regexp.MustCompile(`(?m)^\.It Pa ` + cache.DefaultPath + "/" + name + "\n(\\.Em Secret|Not secret)").MatchString(files) {
			t.Errorf("it is not said whether %s is secret", name)
		}
	}
	if len(code.variables) == 0 {
		t.Error("no variable is read")
	}
	for _, variable := range code.variables {
		name := ""
		switch v := variable.(type) {
		case *ast.BasicLit:
			name, _ = strconv.Unquote(v.Value)
		case *ast.SelectorExpr:
			name = code.constants[v.X.(*ast.Ident).Name+"."+v.Sel.Name]
		}
		if name == "" || !slices.Contains(environment, name) {
			t.Errorf("a variable that is read, %q, is not in ENVIRONMENT", name)
		}
	}
	// Go reads these for us.
	for _, name := range []string{"HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR"} {
		if !slices.Contains(environment, name) {
			t.Errorf("%s is not in ENVIRONMENT", name)
		}
	}
}

// The drop-in is the one that is packaged.
func TestManPageShowsTheDropIn(t *testing.T) {
	shown := cut(t, section(t, readFile(t, programPage), "DROP-IN"), ".Bd -literal -offset indent", ".Ed")
	if dropIn := readFile(t, "../../packaging/systemd/20-kubelet-authenticator.conf"); strings.TrimSpace(shown) != strings.TrimSpace(dropIn) {
		t.Errorf("shown: %s", shown)
	}
}

// The pages are the same bytes at each time of packaging and for each release, and readable on any
// terminal.
func TestManPagesAreReproducible(t *testing.T) {
	for _, path := range []string{programPage, configPage} {
		page := readFile(t, path)
		if !regexp.MustCompile(`(?m)^\.Dd [A-Z][a-z]+ \d{1,2}, \d{4}$`).MatchString(page) {
			t.Errorf("%s: has no fixed date", path)
		}
		if version := regexp.MustCompile(`\bv?\d+\.\d+\.\d+\b`).FindString(page); version != "" {
			t.Errorf("%s: names a version, %s", path, version)
		}
		if other := regexp.MustCompile(`[^\n -~]`).FindString(page); other != "" {
			t.Errorf("%s: is not ASCII: %q", path, other)
		}
	}
}
